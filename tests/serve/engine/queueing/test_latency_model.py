from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.queueing.latency_model import CONFIDENT, OFF_IN_A_ROW, LatencyModel

seconds = st.floats(1e-5, 0.1)


def fitted(batches: list[tuple[int, float]]) -> LatencyModel:
    model = LatencyModel()
    for rows, took in batches:
        model.observe(rows, took)
    return model


@settings(max_examples=40)
@given(seconds, seconds, st.lists(st.integers(1, 64), min_size=CONFIDENT, max_size=80).filter(lambda rows: len(set(rows)) > 3))
def test_a_line_is_found(fixed: float, per_row: float, sizes: list[int]) -> None:
    model = fitted([(rows, fixed + per_row * rows) for rows in sizes * 8])
    for rows in sizes:
        assert model.likely_s(rows) == pytest.approx(fixed + per_row * rows, rel=0.1)


def test_nothing_is_foretold_before_enough_was_seen() -> None:
    model = fitted([(4, 0.01)] * (CONFIDENT - 1))
    assert (model.is_confident, model.likely_s(4), model.at_most_s(4), model.most_rows(0.001, 32)) == (False, 0.0, 0.0, 32)
    model.observe(4, 0.01)
    assert model.is_confident
    assert model.likely_s(4) == pytest.approx(0.01)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 32), seconds), min_size=CONFIDENT, max_size=60))
def test_whatever_is_seen_more_rows_cost_no_less_and_never_less_than_nothing(batches: list[tuple[int, float]]) -> None:
    model = fitted(batches)
    costs = [model.likely_s(rows) for rows in range(1, 65)]
    assert costs[0] >= 0
    assert costs == sorted(costs)
    assert model.safe >= 1


def test_batches_of_one_size_foretell_larger_ones_by_their_share() -> None:
    model = fitted([(8, 0.008)] * 40)
    assert model.likely_s(8) == pytest.approx(0.008)
    assert model.likely_s(16) == pytest.approx(0.016)


def test_the_margin_covers_all_but_one_in_a_hundred() -> None:
    random_ = random.Random(5)  # noqa: S311  (a simulation, the same each time)
    took = [(rows, (0.002 + 0.001 * rows) * random_.lognormvariate(0, 0.3)) for rows in random_.choices(range(1, 17), k=2000)]
    model = fitted(took)
    over = sum(seconds > model.at_most_s(rows) for rows, seconds in took[-1000:]) / 1000
    assert 0.001 <= over <= 0.03


@pytest.mark.parametrize("before", [10, 20, 90, 200])
def test_an_odd_batch_changes_little(before: int) -> None:
    model = fitted([(4, 0.01)] * before + [(4, 5.0)] + [(4, 0.01)] * 32)
    assert model.at_most_s(4) < 0.013


@pytest.mark.parametrize("factor", [3.0, 0.3, 100.0, 0.01])
def test_a_new_pace_is_learned_in_a_few_batches(factor: float) -> None:
    model = fitted([(4, 0.01)] * 500)
    for _ in range(OFF_IN_A_ROW + CONFIDENT):
        model.observe(4, 0.01 * factor)
    assert model.likely_s(4) == pytest.approx(0.01 * factor)
    assert model.safe == pytest.approx(1.0)


def test_a_new_pace_that_is_not_so_far_off_is_learned_in_time() -> None:
    model = fitted([(4, 0.01)] * 500)
    for _ in range(400):
        model.observe(4, 0.015)
    assert model.likely_s(4) == pytest.approx(0.015, rel=0.05)


def test_odd_batches_between_usual_ones_are_no_new_pace() -> None:
    model = fitted([(4, 0.01)] * 500)
    for _ in range(20):
        for took in [0.05] * (OFF_IN_A_ROW - 1) + [0.01]:
            model.observe(4, took)
    assert model.batches == 660


@given(st.floats(0.0001, 0.2))
def test_the_largest_batch_within_a_time_takes_no_longer_and_one_row_more_would(within: float) -> None:
    model = fitted([(rows, 0.002 + 0.001 * rows) for rows in [1, 4, 8, 16] * 20])
    most = model.most_rows(within, 64)
    assert 1 <= most <= 64
    assert most == 1 or model.at_most_s(most) <= within * (1 + 1e-9)
    assert most == 64 or model.at_most_s(most + 1) > within * (1 - 1e-9)
