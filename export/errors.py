"""What can go wrong in this stage for reasons that are the user's to mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ExportError(Exception):
    """A model, an input, a file or a setting that this stage cannot work with; the text is one line and says what to do."""


class UsageError(ExportError):
    """Options that do not go together, or one that cannot be read."""


@contextmanager
def telling_place(hidden: Path, place: Path) -> Iterator[None]:
    """Let errors name the place that the user has given, where the work is done in a hidden one that is gone afterwards."""
    try:
        yield
    except ExportError as error:
        # With its links followed, which is how most of the stage names it, or as it is; the longer may end with the shorter.
        for name in sorted((str(hidden), str(hidden.resolve())), key=len, reverse=True):
            error.args = tuple(part.replace(name, str(place)) if isinstance(part, str) else part for part in error.args)
        raise
