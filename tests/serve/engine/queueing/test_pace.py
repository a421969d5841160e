"""The latency model, and when a batch should go."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.engine.execution.assembly import pad_rows
from halfserve.serve.engine.queueing.pace import (
    CONFIDENT,
    MAX_BUCKETS,
    OFF_IN_A_ROW,
    BatchLimits,
    LatencyModel,
    Pace,
    padded_rows,
)

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
def test_costs_are_never_negative_nor_falling_with_rows(batches: list[tuple[int, float]]) -> None:
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
def test_the_largest_batch_within_a_time_is_exact(within: float) -> None:
    model = fitted([(rows, 0.002 + 0.001 * rows) for rows in [1, 4, 8, 16] * 20])
    most = model.most_rows(within, 64)
    assert 1 <= most <= 64
    assert most == 1 or model.at_most_s(most) <= within * (1 + 1e-9)
    assert most == 64 or model.at_most_s(most + 1) > within * (1 - 1e-9)


FIXED, PER_ROW = 0.02, 0.0001


def pace(*, gap: float = 0.001, trained: bool = True, **limits: float | tuple[int, ...]) -> Pace:
    """Of a model that takes 20 ms a batch and 0.1 ms a row; the last request came at 10 s."""
    made = Pace(BatchLimits(**{"max_rows": 64, **limits}))  # type: ignore[arg-type]  # (keyword by keyword in the tests)
    for rows in [1, 8, 16, 32] * CONFIDENT if trained else []:
        made.observe("a", rows, FIXED + PER_ROW * rows)
    for number in range(50, -1, -1):
        made.arrive("a", 10.0 - number * gap)
    return made


def due(paced: Pace, rows: int, *, deadline: float | None = None, since: float = 10.0) -> float:
    return paced.due("a", rows, since, deadline, 10.0)


def test_a_batch_waits_while_requests_come_faster_than_it_costs() -> None:
    # (n + 1) * 1 ms + n * 0.1 ms < 20 ms holds for up to 17 rows.
    target = pace(latency_target_s=1.0)
    assert due(target, 17) == pytest.approx(10.0 + 3 * 0.001)
    assert due(target, 18) <= 10.0
    assert due(pace(gap=0.02, latency_target_s=1.0), 1) <= 10.0


def test_a_wait_leaves_time_for_the_batch() -> None:
    target = pace(latency_target_s=0.045)
    assert due(target, 2, since=9.977) == pytest.approx(9.977 + 0.045 - (FIXED + 3 * PER_ROW), abs=1e-4)


def test_the_target_bounds_batches_but_not_at_the_price_of_all_company() -> None:
    assert pace(latency_target_s=0.052).most_rows("a") in {59, 60}  # 26 ms, as two batches must fit
    assert pace(latency_target_s=0.030).most_rows("a") in {50, 51}  # 25 ms: a quarter more than one row takes
    assert pace(latency_target_s=0.010).most_rows("a") == 1
    assert pace().most_rows("a") == pace(latency_target_s=9.0).most_rows("a") == 64


def test_a_delay_bounds_the_wait_too() -> None:
    assert due(pace(latency_target_s=1.0, max_delay_s=0.001), 2, since=9.9995) == pytest.approx(10.0005)


def test_nothing_waits_for_a_guess() -> None:
    assert due(pace(trained=False, latency_target_s=1.0), 1) <= 10.0
    hasty = pace(trained=False, max_delay_s=1.0)
    assert due(hasty, 1, deadline=10.5) == 10.0
    assert due(hasty, 1, deadline=12.0) == 11.0


def test_a_deadline_shortens_the_delay_by_what_the_batch_takes() -> None:
    assert due(pace(max_delay_s=1.0), 1, deadline=10.5) == pytest.approx(10.5 - FIXED - 2 * PER_ROW, abs=1e-3)


def test_padded_batches_cost_what_they_run_as() -> None:
    padded = pace(trained=False, padded_rows=(8, 32))
    for rows in [5, 20] * CONFIDENT:
        padded.observe("a", rows, FIXED + PER_ROW * (8 if rows == 5 else 32))
    assert padded.likely_s("a", 1) == pytest.approx(FIXED + PER_ROW * 8, rel=0.01)
    assert padded.likely_s("a", 9) == pytest.approx(FIXED + PER_ROW * 32, rel=0.01)


def test_buckets_are_learned_apart_and_their_number_is_bounded() -> None:
    made = pace()
    for number in range(2 * MAX_BUCKETS):
        made.observe(number, 1, 0.001)
        made.observe("a", 1, FIXED + PER_ROW)
    assert len(made._known) == MAX_BUCKETS
    assert made.likely_s("a", 1) > 0.01
    assert made.expected("a", 0.0105) == 10
    assert made.expected("unknown", 0.01) == 0


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_a_batch_runs_as_the_next_size(rows: int, padded: int) -> None:
    assert padded_rows(rows, (4, 8)) == padded
    assert padded_rows(rows, ()) == rows


@given(st.integers(1, 6), st.integers(0, 6), st.sampled_from(["float16", "int64", "bool"]))
def test_padding_repeats_the_last_row(rows: int, missing: int, dtype: str) -> None:
    array = np.arange(rows * 6).reshape(rows, 2, 3).astype(dtype)
    padded = pad_rows(array, rows + missing)
    assert (padded.shape, padded.dtype) == ((rows + missing, 2, 3), array.dtype)
    np.testing.assert_array_equal(padded[:rows], array)
    assert all((row == array[-1]).all() for row in padded[rows:])
    assert (padded is array) == (missing == 0)
