from __future__ import annotations

import pytest

from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.latency_model import CONFIDENT
from serve.engine.queueing.pace import MAX_BUCKETS, Pace
from serve.engine.queueing.waiting_line import WaitingLine
from tests.serve.engine.waiting import Request

FIXED, PER_ROW = 0.02, 0.0001


def pace(*, gap: float = 0.001, trained: bool = True, **limits: float | tuple[int, ...]) -> Pace:
    """Of a model that takes 20 ms a batch and 0.1 ms a row; the last request came at 10 s."""
    made = Pace(BatchLimits(**{"max_rows": 64, **limits}))  # type: ignore[arg-type]  # (keyword by keyword in the tests)
    for rows in [1, 8, 16, 32] * CONFIDENT if trained else []:
        made.observe("a", rows, FIXED + PER_ROW * rows)
    for number in range(50, -1, -1):
        made.arrive("a", 10.0 - number * gap)
    return made


def line(rows: int, *, deadline: float | None = None, since: float = 10.0) -> WaitingLine[Request]:
    made: WaitingLine[Request] = WaitingLine("a", 1)
    for _ in range(rows):
        made.add(Request(deadline=deadline, arrived_ns=round(since * 1e9)))
    return made


def test_a_batch_waits_while_requests_come_faster_than_it_costs() -> None:
    # (n + 1) * 1 ms + n * 0.1 ms < 20 ms holds for up to 17 rows.
    target = pace(latency_target_s=1.0)
    assert target.due(line(17), 10.0) == pytest.approx(10.0 + 3 * 0.001)
    assert target.due(line(18), 10.0) <= 10.0
    assert pace(gap=0.02, latency_target_s=1.0).due(line(1), 10.0) <= 10.0


def test_a_wait_leaves_time_for_the_batch() -> None:
    target = pace(latency_target_s=0.045)
    assert target.due(line(2, since=9.977), 10.0) == pytest.approx(9.977 + 0.045 - (FIXED + 3 * PER_ROW), abs=1e-4)


def test_the_target_bounds_batches_but_not_at_the_price_of_all_company() -> None:
    assert pace(latency_target_s=0.052).most_rows("a") in {59, 60}  # 26 ms, as two batches must fit
    assert pace(latency_target_s=0.030).most_rows("a") in {50, 51}  # 25 ms: a quarter more than one row takes
    assert pace(latency_target_s=0.010).most_rows("a") == 1
    assert pace().most_rows("a") == pace(latency_target_s=9.0).most_rows("a") == 64


def test_a_delay_bounds_the_wait_too() -> None:
    assert pace(latency_target_s=1.0, max_delay_s=0.001).due(line(2, since=9.9995), 10.0) == pytest.approx(10.0005)


def test_nothing_waits_for_a_guess() -> None:
    assert pace(trained=False, latency_target_s=1.0).due(line(1), 10.0) <= 10.0
    hasty = pace(trained=False, max_delay_s=1.0)
    assert hasty.due(line(1, deadline=10.5), 10.0) == 10.0
    assert hasty.due(line(1, deadline=12.0), 10.0) == 11.0


def test_a_deadline_shortens_the_delay_by_what_the_batch_takes() -> None:
    assert pace(max_delay_s=1.0).due(line(1, deadline=10.5), 10.0) == pytest.approx(10.5 - FIXED - 2 * PER_ROW, abs=1e-3)


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
