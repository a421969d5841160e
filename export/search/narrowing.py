"""Finds a small set that passes a test which costs much, from a ranking that is mostly right.

Pure: nothing here knows what a node is. The test is assumed to be monotone, that is, more members never break what passes.
Where that does not hold, the result still passed the test itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Test: TypeAlias = Callable[[frozenset[T]], bool]


class OutOfRunsError(Exception):
    """The test must not be made once more."""


def enough(rank: Callable[[list[T]], Sequence[Sequence[T]]], passes: Test[T]) -> list[T] | None:
    """Members that pass together, the most needed first.

    A first group is tried, then two more, then four more, and so on, until the set passes; then halving finds how many of the
    last ones it needs. Before each stride the rest is ranked anew, since the worst member may hide the second. A ranking that
    is right finds k groups in about 2*log2(k) tests, and no ranking takes more than 2*log2 of all groups.

    Args:
        rank: Groups of members to add to the given ones, the most needed first; empty where all are in.
        passes: The test.

    Returns:
        The members, or None where all together do not pass.
    """
    members: list[T] = []
    stride = 1
    while groups := rank(members)[:stride]:
        if passes(_joined(members, groups)):
            return [*members, *_flat(groups[: _fewest(members, groups, passes)])]
        members += _flat(groups)
        stride *= 2
    return None


def _fewest(members: Sequence[T], groups: Sequence[Sequence[T]], passes: Test[T]) -> int:
    """How many of the groups are enough, where all are known to be and none is not."""
    low, high = 0, len(groups)
    while high - low > 1:
        middle = (low + high) // 2
        if passes(_joined(members, groups[:middle])):
            high = middle
        else:
            low = middle
    return high


def _joined(members: Sequence[T], groups: Sequence[Sequence[T]]) -> frozenset[T]:
    return frozenset([*members, *_flat(groups)])


def _flat(groups: Sequence[Sequence[T]]) -> list[T]:
    return [member for group in groups for member in group]


def without_the_needless(members: Sequence[T], passes: Test[T]) -> tuple[list[T], bool]:
    """Leave out what can be left out, from the last member to the first, in strides that double while they succeed.

    Every member that stays was left out alone, and the test failed. A ranking has what is needed in front, so most of these
    tests are made when the set is final: k needed members among n take about k + 2*log2(n) tests, if they come first.

    Args:
        members: A set that passes, the most needed first.
        passes: The test.

    Returns:
        A set that passes, in the order given, and whether each of its members was left out alone and failed the test. That is
        false where the tests ran out.
    """
    kept = list(members)
    try:
        while True:
            before = len(kept)
            kept = _thinned(kept, passes)
            # What was needed beside others still is, if the test is monotone. If it is not, a second walk may find more.
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
    """One walk over a set, from its end."""
    end, stride = len(kept), 1
    while end > 0:
        start = max(end - stride, 0)
        rest = kept[:start] + kept[end:]
        if _passes(rest, kept, passes):
            kept, end, stride = rest, start, 2 * stride
        elif end - start > 1:
            stride = (end - start) // 2
        else:
            end, stride = start, 1
    return kept


def _passes(members: list[T], kept: list[T], passes: Test[T]) -> bool:
    try:
        return passes(frozenset(members))
    except OutOfRunsError:
        raise _StoppedError(kept) from None
