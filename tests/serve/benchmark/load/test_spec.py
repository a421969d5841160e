"""Latency histograms, and statistics that add up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.benchmark.load.driver import StatisticsRecorder
from halfserve.serve.benchmark.load.spec import EMPTY, LatencyHistogram, LoadStatistics

LATENCIES = st.lists(st.integers(1, 10**13), min_size=1, max_size=200)


def of(latencies_ns: list[int]) -> LatencyHistogram:
    return LatencyHistogram.of(np.array(latencies_ns, np.int64))


@given(LATENCIES, st.sampled_from([0.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_percentiles_are_latencies_that_occurred_within_a_bucket(latencies_ns: list[int], percent: float) -> None:
    (found,) = of(latencies_ns).percentiles_ms([percent])
    exact = float(np.percentile(latencies_ns, percent, method="inverted_cdf"))
    assert found == pytest.approx(exact / 1e6, rel=5e-4)
    assert min(latencies_ns) <= found * 1e6 * (1 + 1e-12)
    assert found * 1e6 * (1 - 1e-12) <= max(latencies_ns)


@given(st.lists(st.lists(st.integers(1, 10**12), max_size=50), min_size=1, max_size=5))
def test_merged_histograms_equal_the_whole(parts: list[list[int]]) -> None:
    merged, whole = LatencyHistogram.merged(of(part) for part in parts), of([value for part in parts for value in part])
    assert merged.values_ns.tolist() == whole.values_ns.tolist()
    assert merged.counts.tolist() == whole.counts.tolist()
    assert (merged.sum_ns, merged.min_ns, merged.max_ns) == (whole.sum_ns, whole.min_ns, whole.max_ns)


@given(LATENCIES)
def test_mean_total_and_extremes_are_exact(latencies_ns: list[int]) -> None:
    histogram = of(latencies_ns)
    assert histogram.total == len(latencies_ns)
    assert histogram.mean_ms == pytest.approx(sum(latencies_ns) / len(latencies_ns) / 1e6)
    assert (histogram.min_ns, histogram.max_ns) == (min(latencies_ns), max(latencies_ns))


def test_latencies_within_a_bound_are_counted() -> None:
    histogram = of([1_000_000, 2_000_000, 30_000_000])
    assert [histogram.within(bound_ms) for bound_ms in (0.5, 1.1, 2.5, 100)] == [0, 1, 2, 3]


def test_many_latencies_need_few_buckets() -> None:
    random = np.random.default_rng(0)
    histogram = LatencyHistogram.of(random.integers(10**5, 10**8, 200_000))
    assert histogram.total == 200_000
    assert len(histogram.values_ns) < 12_000


def test_an_empty_histogram_has_no_latencies() -> None:
    assert LatencyHistogram.of(np.empty(0, np.int64)) is EMPTY
    assert LatencyHistogram.merged([EMPTY, EMPTY]).total == 0
    assert EMPTY.within(1) == 0


def test_busy_is_the_share_of_a_window_without_waiting() -> None:
    recorder = StatisticsRecorder(1, 1_000)
    recorder.idle_ns += 300
    first, second = recorder.window(2_000), recorder.window(3_000)
    assert first.busy == pytest.approx(0.7)
    assert second.busy == 1.0
    assert (first.seconds, second.seconds) == (1e-6, 1e-6)


def test_busy_is_weighted_over_windows_and_maximal_over_processes() -> None:
    long, short = (
        LoadStatistics(seconds=3.0, busy=0.2, sent=1),
        LoadStatistics(seconds=1.0, busy=1.0, sent=2, errors=Counter(UNKNOWN=1)),
    )
    after, beside = long.then([short]), long.beside([short])
    assert after.busy == pytest.approx(0.4)
    assert (after.seconds, after.sent) == (4.0, 3)
    assert (beside.seconds, beside.busy, beside.sent, beside.failed) == (3.0, 1.0, 3, 1)
