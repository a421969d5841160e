from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from serve.engine.precision_guard.degradation import LEAST_RUNS, WINDOW, Degradation


def test_few_runs_say_nothing() -> None:
    state = Degradation(0.01)
    assert not any(state.add(1.0) for _ in range(LEAST_RUNS - 1))
    assert not state.degraded
    assert state.add(1.0)
    assert state.degraded


def test_one_bad_run_in_twenty_is_bearable_and_more_are_not() -> None:
    state = Degradation(0.01)
    for run in range(WINDOW):
        assert not state.add(0.02 if run % 20 == 19 else 0.005)
    assert not state.degraded
    assert state.add(math.nan)
    assert state.degraded


def test_it_recovers_only_when_hardly_any_run_is_bad() -> None:
    state = Degradation(0.01)
    changes = [state.add(1.0) for _ in range(30)]
    assert changes.count(True) == 1
    good = 0
    while state.degraded:
        state.add(0.0)
        good += 1
    # All but two of the bad runs have left the window by then.
    assert good == WINDOW - 2
    assert state.share <= 0.01


@given(st.lists(st.sampled_from([0.0, 0.01, 0.02, math.inf, math.nan]), max_size=500))
def test_a_change_is_reported_exactly_when_the_state_changes(errors: list[float]) -> None:
    state = Degradation(0.01)
    for error in errors:
        before = state.degraded
        assert state.add(error) == (state.degraded is not before)
        assert 0 <= state.share <= 1
