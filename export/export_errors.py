"""Errors of this stage that the user can fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ExportError(Exception):
    """A model, an input, a file or a setting that this stage cannot use; the text is one line and says what to do."""


class NothingConvertedError(ExportError):
    """A model of which every node that computes on floats has to stay float32: the converted model would be the source."""


class UsageError(ExportError):
    """Options that contradict each other, or one that cannot be parsed."""


@contextmanager
def telling_place(hidden: Path, place: Path | str) -> Iterator[None]:
    """Name the user's path or URL in errors instead of the temporary folder where the work is done."""
    try:
        yield
    except ExportError as error:
        # Errors name the path as given or with links resolved; one of the two may end with the other.
        for name in sorted((str(hidden), str(hidden.resolve())), key=len, reverse=True):
            error.args = tuple(part.replace(name, str(place)) if isinstance(part, str) else part for part in error.args)
        raise
