from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.benchmark.load.histogram import EMPTY, LatencyHistogram

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
def test_parts_together_are_the_whole(parts: list[list[int]]) -> None:
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


def test_what_keeps_a_bound_is_counted() -> None:
    histogram = of([1_000_000, 2_000_000, 30_000_000])
    assert [histogram.within(bound_ms) for bound_ms in (0.5, 1.1, 2.5, 100)] == [0, 1, 2, 3]


def test_many_latencies_are_few_numbers() -> None:
    random = np.random.default_rng(0)
    histogram = LatencyHistogram.of(random.integers(10**5, 10**8, 200_000))
    assert histogram.total == 200_000
    assert len(histogram.values_ns) < 12_000


def test_nothing_is_nothing() -> None:
    assert LatencyHistogram.of(np.empty(0, np.int64)) is EMPTY
    assert LatencyHistogram.merged([EMPTY, EMPTY]).total == 0
    assert EMPTY.within(1) == 0
