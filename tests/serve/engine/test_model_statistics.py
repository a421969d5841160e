"""Counters and latency histograms."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    InferenceError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from halfserve.serve.engine.model_statistics import (
    EDGES_NS,
    STAGES,
    TOGETHER,
    WINDOW_NS,
    BatchTimes,
    CountedBatches,
    ServerFigures,
    StageHistograms,
    Statistics,
    reason_of,
)


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


@given(st.lists(st.tuples(st.lists(st.integers(0, 10**9), min_size=1, max_size=4), st.integers(1, 8)), max_size=200))
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


durations = st.integers(0, 3 * EDGES_NS[-1])
batches = st.lists(st.tuples(st.lists(durations, min_size=1, max_size=5), durations, durations, durations), max_size=20)
NOW = 10**15


def naive(values: list[int]) -> tuple[int, ...]:
    """How many lie in each bucket, an edge belonging to the bucket below it."""
    edges = (-1, *EDGES_NS, 10**18)
    return tuple(sum(low < v <= high for v in values) for low, high in pairwise(edges))


@given(batches)
def test_every_request_counts_once_in_each_stage(cases: list[tuple[list[int], int, int, int]]) -> None:
    histograms = StageHistograms()
    expected: dict[str, list[int]] = {stage: [] for stage in STAGES}
    for waits, assembling, computing, splitting in cases:
        assembled = NOW + assembling
        computed = assembled + computing
        times = BatchTimes(started=NOW, assembled=assembled, computed=computed, split=computed + splitting)
        histograms.add(CountedBatches([(times, [NOW - wait for wait in waits], 1)]))
        for wait in waits:
            spent = (wait, assembling, computing, splitting, wait + assembling + computing + splitting)
            for stage, ns in zip(STAGES, spent, strict=True):
                expected[stage].append(ns)
    for stage, histogram in histograms.read().items():
        assert histogram.counts == naive(expected[stage])
        assert histogram.ns == sum(expected[stage])
        assert histogram.count == len(expected[stage])


def test_uncounted_batches_do_not_pile_up() -> None:
    statistics = Statistics()
    times = BatchTimes(started=NOW, assembled=NOW + 1, computed=NOW + 2, split=NOW + 3)
    for _ in range(2 * TOGETHER):
        statistics.batch_done(times, [NOW - 5, NOW - 6], 2)
    assert len(statistics._uncounted) < TOGETHER
    assert statistics.histograms()["total"].count == 4 * TOGETHER
    assert statistics.histograms()["queue"].ns == 22 * TOGETHER


@given(
    st.lists(
        st.lists(st.integers(1, 10**10), min_size=4, max_size=4).map(sorted),
        min_size=1,
        max_size=200,
    )
)
def test_quantiles_are_those_of_the_requests_within_two_percent(batches: list[list[int]]) -> None:
    statistics = Statistics()
    statistics.keep_latencies()
    now = time.monotonic_ns()
    for _, assembled, computed, split in batches:
        times = BatchTimes(started=now - split, assembled=now - computed, computed=now - assembled, split=now)
        statistics.batch_done(times, [now - 2 * 10**10], rows=1)
    shares = (0.0, 0.5, 0.99, 1.0)
    told = statistics.quantiles(shares)
    assert list(told) == list(STAGES)
    for stage, values in {
        "queue": [2 * 10**10 - split for *_, split in batches],
        "compute_infer": [computed - assembled for _, assembled, computed, _ in batches],
        "total": [2 * 10**10 for _ in batches],
    }.items():
        ordered = sorted(values)
        expected = [max(1, ordered[max(1, math.ceil(share * len(ordered))) - 1]) for share in shares]
        assert told[stage] == pytest.approx(expected, rel=0.02), stage


def test_requests_of_more_than_a_minute_ago_have_no_quantiles() -> None:
    statistics = Statistics()
    assert statistics.quantiles([0.5]) == {}
    statistics.keep_latencies()
    before = time.monotonic_ns() - WINDOW_NS
    times = BatchTimes(started=before, assembled=before, computed=before, split=before)
    statistics.batch_done(times, [before], rows=1)
    assert all(math.isnan(value) for values in statistics.quantiles([0.5]).values() for value in values)
