"""What ends a training run early."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

# Python's own modules, those that are installed (torch), and this package.
_NOT_THE_USERS = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")} | {Path(__file__).parents[1]}


class TrainingError(RuntimeError):
    """A run that cannot start or go on, for a reason that its user can mend."""


class PeerError(TrainingError):
    """Another process of the same run failed first, and says why."""


def one_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def place_of(error: BaseException) -> str:
    """Where in the user's own code an exception came from, for the end of a message; empty if there is none of it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_hidden(frame.filename)]
    return f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_hidden(filename: str) -> bool:
    return filename.startswith("<") or not _NOT_THE_USERS.isdisjoint(Path(filename).parents)
