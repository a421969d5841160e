"""What ends a training run early."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run that cannot start or go on, for a reason that its user can mend."""


class PeerError(TrainingError):
    """Another process of the same run failed first, and says why."""


def one_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
