"""Search for the highest load, and stability of windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.benchmark.load.spec import LoadStatistics
from halfserve.serve.benchmark.measurement import Goal, best_of, is_stable, search
from tests.serve.benchmark.levels import level, tally

STEADY = tally([1.0] * 100)
GOAL = Goal(percent=99, max_ms=10)


@pytest.mark.parametrize(
    ("windows", "stable"),
    [
        ([STEADY, STEADY], False),
        ([STEADY, STEADY, STEADY], True),
        ([tally([9.0] * 5), STEADY, STEADY, STEADY], True),
        ([STEADY, STEADY, tally([1.0] * 95)], True),
        ([STEADY, STEADY, tally([1.0] * 70)], False),
        ([STEADY, STEADY, tally([1.0] * 50, seconds=1.0)], True),
        ([STEADY, STEADY, tally([1.0] * 98 + [5.0] * 2)], False),
        ([STEADY, STEADY, tally([])], False),
    ],
    ids=["too few", "steady", "steady at last", "nearly", "slower", "shorter", "a tail", "nothing"],
)
def test_three_windows_must_agree(windows: list[LoadStatistics], stable: bool) -> None:
    assert is_stable(windows, 99) is stable


def test_the_percentile_is_the_one_asked_for() -> None:
    tail = tally([1.0] * 98 + [5.0] * 2)
    assert is_stable([STEADY, STEADY, tail], 50)


def server_with_limit(limit: float) -> Callable[[Load], Level]:
    """Answers in 5 ms up to a load, and in 50 ms above it."""
    return lambda load: level(load=load, latencies_ms=[5.0 if load.amount <= limit else 50.0])


@settings(max_examples=30)
@given(st.integers(1, 500), st.integers(0, 500))
def test_the_highest_number_in_flight_is_found(lowest: int, more: int) -> None:
    levels = list(search([Load(concurrency=lowest)], GOAL, server_with_limit(lowest + more)))
    best = best_of(levels, GOAL)
    assert best is not None
    assert best.load.concurrency == lowest + more
    assert len({one.load for one in levels}) < 30


@settings(max_examples=30)
@given(st.integers(1, 100), st.integers(0, 200), st.integers(0, 400))
def test_a_search_stays_within_its_ends(lowest: int, more: int, limit: int) -> None:
    loads = [Load(concurrency=lowest), Load(concurrency=lowest + more)]
    levels = list(search(loads, GOAL, server_with_limit(lowest + limit)))
    best = best_of(levels, GOAL)
    assert best is not None
    assert best.load.concurrency == lowest + min(more, limit)
    assert all(lowest <= one.load.amount <= lowest + more for one in levels)


@settings(max_examples=30)
@given(st.floats(1, 1e5))
def test_the_highest_rate_is_found_within_a_twentieth(limit: float) -> None:
    best = best_of(list(search([Load(rate=1.0)], GOAL, server_with_limit(limit))), GOAL)
    assert best is not None
    assert limit / 1.06 <= best.load.amount <= limit


def test_a_load_that_fails_gets_a_second_chance() -> None:
    tried: list[Load] = []

    def hiccup_at_four(load: Load) -> Level:
        tried.append(load)
        bad = load.amount > 5 or (load.amount == 4 and tried.count(load) == 1)
        return level(load=load, latencies_ms=[50.0 if bad else 5.0])

    best = best_of(list(search([Load(concurrency=1)], GOAL, hiccup_at_four)), GOAL)
    assert best is not None
    assert best.load.concurrency == 5


def test_a_failed_request_breaks_the_goal() -> None:
    assert GOAL.kept_by(level())
    assert not GOAL.kept_by(level(errors={"RESOURCE_EXHAUSTED": 1}))
    assert not GOAL.kept_by(level(ended_early="interrupted"))
    assert best_of([level(errors={"INTERNAL": 1})], GOAL) is None


def test_a_goal_missed_by_the_lowest_load_is_an_error() -> None:
    measured = search([Load(rate=100.0)], GOAL, server_with_limit(0))
    with pytest.raises(BenchmarkError, match="even 100 requests/s does not keep p99 within 10 ms"):
        list(measured)
