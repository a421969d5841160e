"""Find a small set that passes an expensive test, from an approximate ranking, within limits on runs and time.

The functions know nothing of nodes. They assume a monotone test: adding members never breaks a passing set. With any other
test, the result still passed the test itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from halfserve.export.conversion_settings import FEWEST_RUNS, PipelineSettings

Ending: TypeAlias = Literal["complete", "max_runs", "max_minutes", "interrupted"]
T = TypeVar("T")
Test: TypeAlias = Callable[[frozenset[T]], bool]


@dataclass
class Usage:
    """Runs and time that a search has used, counted from construction."""

    settings: PipelineSettings
    runs: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def reached(self) -> Literal["max_runs", "max_minutes"] | None:
        """The limit that forbids another run."""
        if self.runs < FEWEST_RUNS:
            return None
        if self.runs >= self.settings.max_runs:
            return "max_runs"
        minutes = self.settings.max_minutes
        return "max_minutes" if minutes is not None and self.seconds >= 60 * minutes else None


class OutOfRunsError(Exception):
    """A limit forbids another test."""


def smallest_passing_prefix(rank: Callable[[list[T]], Sequence[Sequence[T]]], passes: Test[T]) -> list[T] | None:
    """Find members that pass together, most needed first; None where all together do not pass.

    Adds one group, then two more, then four more and so on until the set passes; bisection then finds how many of the last
    groups it needs. `rank` returns the groups to add to the given members. The rest is ranked again before each stride, since
    the worst member may hide the second worst. A correct ranking finds k groups in about 2*log2(k) tests; any ranking takes at
    most 2*log2 of the count of groups.
    """
    members: list[T] = []
    stride = 1
    while groups := rank(members)[:stride]:
        if passes(frozenset([*members, *_flat(groups)])):
            low, high = 0, len(groups)  # `low` groups do not pass, `high` groups do
            while high - low > 1:
                middle = (low + high) // 2
                if passes(frozenset([*members, *_flat(groups[:middle])])):
                    high = middle
                else:
                    low = middle
            return [*members, *_flat(groups[:high])]
        members += _flat(groups)
        stride *= 2
    return None


def _flat(groups: Sequence[Sequence[T]]) -> list[T]:
    return [member for group in groups for member in group]


def minimized(members: Sequence[T], passes: Test[T]) -> tuple[list[T], bool]:
    """Remove unneeded members of a passing set, from the last to the first, in strides that double while they succeed.

    Each remaining member was removed alone, and the test failed. The ranking puts needed members first, so most of these tests
    are made when the set is final: k needed members among n take about k + 2*log2(n) tests.

    Returns:
        A passing set in the given order, and whether it is minimal: false where the tests ran out.
    """
    kept = list(members)
    try:
        while True:
            before = len(kept)
            kept = _thinned(kept, passes)
            # A monotone test needs one walk; with any other, a second walk may remove more.
            if len(kept) == before:
                return kept, True
    except _StoppedError as stopped:
        return stopped.kept, False


class _StoppedError(Exception):
    """Carries the set that had passed when the tests ran out."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.kept = kept


def _thinned(kept: list[T], passes: Test[T]) -> list[T]:
    """Walk over the set once, from its end."""
    end, stride = len(kept), 1
    while end > 0:
        start = max(end - stride, 0)
        rest = kept[:start] + kept[end:]
        try:
            passed = passes(frozenset(rest))
        except OutOfRunsError:
            raise _StoppedError(kept) from None
        if passed:
            kept, end, stride = rest, start, 2 * stride
        elif end - start > 1:
            stride = (end - start) // 2
        else:
            end, stride = start, 1
    return kept
