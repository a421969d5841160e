"""What other people's exceptions say, in one line."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch

_TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def one_line(error: BaseException) -> str:
    """The exception's type and the first line of its text."""
    text = _TERMINAL_COLOURS.sub("", str(error))
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def root(error: BaseException) -> BaseException:
    """The exception that started it all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def where(error: BaseException) -> str:
    """` (at model.py:42)`, the innermost line outside torch that the exception came through; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)]
    theirs = [frame for frame in frames if not frame.filename.startswith("<") and "torch" not in Path(frame.filename).parts]
    return f" (at {Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
