from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.level import Level
from serve.benchmark.loads import Load
from serve.benchmark.sweep import Goal, best_of, search, sweep
from tests.serve.benchmark.levels import level

GOAL = Goal(percent=99, max_ms=10)


def server_with_limit(limit: float) -> Callable[[Load], Level]:
    """Answers in 5 ms up to a load, and in 50 ms above it."""
    return lambda load: level(load=load, latencies_ms=[5.0 if load.amount <= limit else 50.0])


def test_a_sweep_measures_what_it_is_told() -> None:
    loads = [Load(concurrency=number) for number in (4, 1)]
    assert [one.load for one in sweep(loads, server_with_limit(9))] == loads


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


def test_errors_break_the_goal_too() -> None:
    assert GOAL.kept_by(level())
    assert not GOAL.kept_by(level(errors={"RESOURCE_EXHAUSTED": 1}))
    assert not GOAL.kept_by(level(ended_early="interrupted"))
    assert best_of([level(errors={"INTERNAL": 1})], GOAL) is None


def test_a_goal_that_even_the_lowest_load_misses() -> None:
    measured = search([Load(rate=100.0)], GOAL, server_with_limit(0))
    with pytest.raises(BenchmarkError, match="even 100 requests/s does not keep p99 within 10 ms"):
        list(measured)
