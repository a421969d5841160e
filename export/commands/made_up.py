"""Inputs that are made up because the user gave no samples: their sizes, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence

from export.errors import ExportError, UsageError

NOTE = "the inputs were made up; give --samples for a verdict on your own"


def sizes_of(entries: Sequence[str]) -> dict[str, int]:
    """Sizes of dimensions by name, from NAME=SIZE.

    Raises:
        UsageError: An entry is not of that form.
    """
    sizes = {}
    for entry in entries:
        name, _, size = entry.rpartition("=")
        if not name or not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise UsageError(f"--dim {entry!r} is not of the form NAME=SIZE, such as --dim sequence=128")
        sizes[name] = int(size)
    return sizes


def way_out(error: ExportError) -> str:
    """What to do where a model fails on made-up inputs; empty for any other error."""
    if "fails on the samples" not in str(error):
        return ""
    return "the inputs were made up: give --samples, or sizes with --dim NAME=SIZE"
