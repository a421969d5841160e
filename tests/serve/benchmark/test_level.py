from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.level import Latency, Level
from tests.serve.benchmark.levels import level, outcome


def test_rates_and_means() -> None:
    figures = level(errors={"INTERNAL": 3}).to_json()
    assert figures == {
        "concurrency": 2,
        "requests": 4,
        "errors": 3,
        "errors_by_status": {"INTERNAL": 3},
        "seconds": 2.0,
        "requests_per_second": 2.0,
        "rows_per_second": 4.0,
        "latency_ms": {"p50": 2.0, "p90": 4.0, "p99": 4.0, "max": 4.0, "mean": 2.5},
        "mean_batch_size": 4.0,
        "server_ms": {"queue": 0.5, "compute": 1.5},
    }


def test_a_server_without_statistics_leaves_nulls() -> None:
    figures = level(server=None).to_json()
    assert figures["mean_batch_size"] is None
    assert figures["server_ms"] == {"queue": None, "compute": None}


@given(st.lists(st.integers(1, 10**12), min_size=1))
def test_percentiles_are_latencies_that_occurred(latencies_ns: list[int]) -> None:
    latency = Latency.of(np.array(latencies_ns, np.int64))
    assert latency.p50 <= latency.p90 <= latency.p99 <= latency.max
    assert {latency.p50, latency.p90, latency.p99, latency.max} <= {n / 1e6 for n in latencies_ns}
    # Nearest rank: at least half of them are no greater, and fewer than half are smaller.
    assert sum(n / 1e6 <= latency.p50 for n in latencies_ns) * 2 >= len(latencies_ns)
    assert sum(n / 1e6 < latency.p50 for n in latencies_ns) * 2 < len(latencies_ns)


def test_no_success_is_an_error_with_the_servers_message() -> None:
    failed = outcome([], {"INTERNAL": 1, "RESOURCE_EXHAUSTED": 7})
    text = r"at concurrency 64 no request succeeded \(8 failed\): RESOURCE_EXHAUSTED: the server's text for RESOURCE_EXHAUSTED"
    with pytest.raises(BenchmarkError, match=text):
        Level.of(failed, None, concurrency=64, batch_size=1)


def test_no_request_at_all_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="none was started in the time given"):
        Level.of(outcome([]), None, concurrency=1, batch_size=1)
