from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.model_statistics import EDGES_NS, BatchTimes
from halfserve.serve.http.page.model_history import SAMPLES, ModelHistory, quantile_ms
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import running_server


def counts_of(times_ns: list[int]) -> list[int]:
    counts: list[int] = np.bincount(np.searchsorted(EDGES_NS, times_ns), minlength=len(EDGES_NS) + 1).tolist()
    return counts


@given(
    times=st.lists(st.integers(EDGES_NS[0], EDGES_NS[-1]), min_size=1, max_size=50), share=st.sampled_from([0.01, 0.5, 0.99, 1])
)
def test_a_quantile_lies_in_its_bucket(times: list[int], share: float) -> None:
    found = quantile_ms(counts_of(times), share)
    exact = sorted(times)[max(int(np.ceil(share * len(times))) - 1, 0)]
    place = int(np.searchsorted(EDGES_NS, exact))
    low = EDGES_NS[place - 1] if place else EDGES_NS[0] / 2
    assert found is not None
    assert low / 1e6 * 0.999 <= found <= EDGES_NS[place] / 1e6 * 1.001


def test_no_requests_have_no_quantile() -> None:
    assert quantile_ms(counts_of([]), 0.5) is None


def test_what_is_longer_than_all_buckets_has_one() -> None:
    assert quantile_ms(counts_of([10**12]), 1) == pytest.approx(20_000)


def test_samples_are_of_the_time_between_two_looks() -> None:
    model = held_model(HeldBackend())
    with running_server(lambda: [model]) as server:
        history = ModelHistory(server.core)

        def work() -> None:
            history.look()
            times = BatchTimes(started=2_000_000, assembled=2_000_000, computed=3_000_000, split=3_000_000)
            model.statistics.batch_done(times, [0, 1_000_000], 6)
            model.statistics.failed(0)
            history.look()
            history.look()

        server.call(work)
        before, busy, after = history.of(model, 0)
        assert (before.requests, before.median_ms, before.batch_rows) == (0, None, None)
        assert busy.requests == pytest.approx(2 * busy.failures)
        assert busy.rows == pytest.approx(3 * busy.requests)
        assert busy.batch_rows == 6
        assert busy.median_ms is not None
        assert busy.p99_ms is not None
        assert 1 <= busy.median_ms <= 2 <= busy.p99_ms <= 5
        assert (after.requests, after.failures, after.p99_ms) == (0, 0, None)
        assert history.of(model, busy.time_s) == [after]
        assert history.latencies(model) == counts_of([2_000_000, 3_000_000])


def test_only_the_latest_are_kept_and_only_of_what_is_served() -> None:
    model = held_model(HeldBackend())
    with running_server(lambda: [model]) as server:
        history = ModelHistory(server.core)

        def look_often() -> None:
            for _ in range(SAMPLES + 5):
                history.look()

        server.call(history.look)
        times = BatchTimes(started=0, assembled=0, computed=1, split=1_000_000)
        server.call(lambda: model.statistics.batch_done(times, [0], 1))
        server.call(history.look)
        assert sum(history.latencies(model)) == 1
        server.call(look_often)
        assert sum(history.latencies(model)) == 1  # it may be somewhat older than the samples
        server.call(look_often)
        assert sum(history.latencies(model)) == 0
        ends = [sample.time_s for sample in history.of(model, 0)]
        assert len(ends) == SAMPLES
        assert ends == sorted(ends)
        assert len(history.of(model, ends[-3])) <= 2
        assert history.of(held_model(HeldBackend()), 0) == []
