from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.export.search.narrowing import OutOfRunsError, minimized, smallest_passing_prefix

Members = st.sets(st.integers(0, 199), max_size=12)


class Oracle:
    """Passes what holds all needed members; counts the tests, each set once."""

    def __init__(self, needed: set[int], limit: int | None = None) -> None:
        self.needed, self.limit = needed, limit
        self.asked: dict[frozenset[int], bool] = {}

    def __call__(self, members: frozenset[int]) -> bool:
        if members not in self.asked:
            if self.limit is not None and len(self.asked) >= self.limit:
                raise OutOfRunsError
            self.asked[members] = self.needed <= members
        return self.asked[members]


def ranked(order: list[int]) -> Callable[[list[int]], list[tuple[int]]]:
    return lambda members: [(member,) for member in order if member not in members]


@given(Members, st.randoms(use_true_random=False))
def test_any_ranking_leads_to_exactly_what_is_needed(needed: set[int], random: object) -> None:
    order = list(range(200))
    random.shuffle(order)  # type: ignore[attr-defined]  # (hypothesis gives a random.Random, and types it as one only for itself)
    oracle = Oracle(needed)
    members = smallest_passing_prefix(ranked(order), oracle)
    assert members is not None
    assert needed <= set(members)
    tests = len(oracle.asked)
    assert tests <= 2 * math.log2(len(order)) + 2
    kept, proved = minimized(members, oracle)
    assert proved
    assert set(kept) == needed
    assert kept == [member for member in order if member in needed]


@given(Members)
def test_a_right_ranking_needs_few_tests(needed: set[int]) -> None:
    order = [*sorted(needed), *(member for member in range(200) if member not in needed)]
    oracle = Oracle(needed)
    members = smallest_passing_prefix(ranked(order), oracle)
    assert members is not None
    kept, _ = minimized(members, oracle)
    assert set(kept) == needed
    assert len(oracle.asked) <= 2 * math.log2(len(needed) + 1) + 2 + len(needed) + 1


def test_groups_stay_whole_and_are_ranked_before_each_stride() -> None:
    asked: list[list[str]] = []

    def rank(members: list[str]) -> list[tuple[str, ...]]:
        asked.append(list(members))
        return [group for group in (("a", "b"), ("c",), ("d", "e")) if group[0] not in members]

    assert smallest_passing_prefix(rank, lambda members: "c" in members) == ["a", "b", "c"]
    assert asked == [[], ["a", "b"]]


def test_no_passing_set_returns_none() -> None:
    oracle = Oracle({999})
    assert smallest_passing_prefix(ranked(list(range(50))), oracle) is None
    assert frozenset(range(50)) in oracle.asked
    assert smallest_passing_prefix(ranked([]), oracle) is None


def test_the_set_still_passes_when_tests_run_out() -> None:
    needed = {3, 50, 90}
    for limit in range(12):
        kept, proved = minimized(list(range(100)), Oracle(needed, limit))
        assert needed <= set(kept)
        assert not proved
    with pytest.raises(OutOfRunsError):
        smallest_passing_prefix(ranked(list(range(100))), Oracle(needed, 3))


def test_a_test_that_is_not_monotone_still_yields_a_minimal_set() -> None:
    def passes(members: frozenset[int]) -> bool:
        return {0, 1} <= members or ({0} <= members and 5 not in members)

    kept, proved = minimized([0, 1, 5], passes)
    assert (kept, proved) == ([0], True)
