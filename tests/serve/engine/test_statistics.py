from __future__ import annotations

import time

import pytest

from serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    InferenceError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from serve.engine.server_figures import ServerFigures
from serve.engine.statistics import BatchTimes, Statistics, reason_of


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
    times = BatchTimes(started=1_000, assembled=1_010, computed=1_110, split=1_115)
    statistics.batch_done(times, [900, 950, 990], rows=4)
    assert (statistics.success.count, statistics.success.ns) == (3, 215 + 165 + 125)
    assert (statistics.queue.count, statistics.queue.ns) == (3, 100 + 50 + 10)
    stages = (statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert [(stage.count, stage.ns) for stage in stages] == [(3, 30), (3, 300), (3, 15)]
    assert (statistics.rows, statistics.batches, statistics.latest_rows) == (4, 1, 4)
    assert statistics.latest is times
    size = statistics.by_batch_size[4]
    assert [(s.count, s.ns) for s in (size.compute_input, size.compute_infer, size.compute_output)] == [
        (1, 10),
        (1, 100),
        (1, 5),
    ]
    statistics.batch_done(times, [900], rows=4)
    assert statistics.by_batch_size[4].compute_infer.count == 2
    assert statistics.histograms.read()["total"].count == 4
    assert abs(statistics.last_inference_ms / 1000 - time.time()) < 60


def test_failures_are_counted_by_reason() -> None:
    statistics = Statistics()
    arrived = time.monotonic_ns() - 5_000
    for error in (None, BackendError("a"), BackendError("b")):
        statistics.failed(arrived, error)
    assert statistics.failures == {"cancelled": 1, "backend": 2}
    assert statistics.fail.count == 3
    assert statistics.fail.ns >= 15_000


def test_requests_that_reached_no_model_are_counted_by_reason() -> None:
    figures = ServerFigures()
    for error in (InvalidArgumentError("a"), InvalidArgumentError("b"), UnavailableError("c")):
        figures.refuse(error)
    assert figures.refused == {"invalid_argument": 2, "unavailable": 1}
