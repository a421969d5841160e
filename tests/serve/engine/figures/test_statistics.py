from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    InferenceError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from serve.engine.figures.server_figures import ServerFigures
from serve.engine.figures.statistics import TOGETHER, BatchTimes, Statistics, reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "cancelled"),
        (QueueFullError("full", retry_after_s=1.0), "queue_full"),
        (DeadlineExceededError("late"), "deadline_exceeded"),
        (UnavailableError("draining"), "unavailable"),
        (BackendError("broken"), "backend"),
        (InvalidArgumentError("wrong"), "invalid_argument"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_has_a_reason_fit_for_a_label(error: InferenceError | None, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_batch_is_recorded_for_its_requests_its_rows_and_its_size() -> None:
    statistics = Statistics()
    start = time.monotonic_ns()
    times = BatchTimes(started=start, assembled=start + 10, computed=start + 110, split=start + 115)
    statistics.batch_done(times, [start - 100, start - 50, start - 10], rows=4)
    totals = statistics.totals
    assert (totals.success.count, totals.success.ns) == (3, 215 + 165 + 125)
    assert (totals.queue.count, totals.queue.ns) == (3, 100 + 50 + 10)
    stages = (totals.compute_input, totals.compute_infer, totals.compute_output)
    assert [(stage.count, stage.ns) for stage in stages] == [(3, 30), (3, 300), (3, 15)]
    assert (totals.rows, totals.batches, statistics.latest_rows) == (4, 1, 4)
    assert statistics.latest is times
    size = totals.by_batch_size[4]
    assert [(s.count, s.ns) for s in (size.compute_input, size.compute_infer, size.compute_output)] == [
        (1, 10),
        (1, 100),
        (1, 5),
    ]
    statistics.batch_done(times, [start - 100], rows=4)
    assert statistics.totals.by_batch_size[4].compute_infer.count == 2
    assert statistics.histograms()["total"].count == 4
    assert abs(statistics.totals.last_inference_ms / 1000 - time.time()) < 60


@given(st.lists(st.tuples(st.lists(st.integers(0, 10**9), min_size=1, max_size=4), st.integers(1, 8)), max_size=3 * TOGETHER))
def test_batches_count_the_same_however_many_are_counted_together(batches: list[tuple[list[int], int]]) -> None:
    late, now = Statistics(), Statistics()
    for waits, rows in batches:
        start = time.monotonic_ns()
        times = BatchTimes(started=start, assembled=start + 1, computed=start + 3, split=start + 6)
        for statistics in (late, now):
            statistics.batch_done(times, [start - wait for wait in waits], rows)
        assert now.totals.batches > 0
    assert replace(late.totals, last_inference_ms=0) == replace(now.totals, last_inference_ms=0)
    assert late.totals.success.ns == sum(sum(waits) + 6 * len(waits) for waits, _ in batches)
    assert late.histograms() == now.histograms()


def test_failures_are_counted_by_reason() -> None:
    statistics = Statistics()
    arrived = time.monotonic_ns() - 5_000
    for error in (None, BackendError("a"), BackendError("b")):
        statistics.failed(arrived, error)
    assert statistics.totals.failures == {"cancelled": 1, "backend": 2}
    assert statistics.totals.fail.count == 3
    assert statistics.totals.fail.ns >= 15_000


def test_requests_that_reached_no_model_are_counted_by_reason() -> None:
    figures = ServerFigures()
    for error in (InvalidArgumentError("a"), InvalidArgumentError("b"), UnavailableError("c")):
        figures.refuse(error)
    assert figures.refused == {"invalid_argument": 2, "unavailable": 1}
