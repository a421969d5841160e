from __future__ import annotations

from dataclasses import replace

import pytest

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.load_generator import LoadGenerator
from serve.benchmark.request_inputs import RequestPlan
from serve.benchmark.sweep import Sweep, run_sweep
from serve.client import InferenceClient

SWEEP = Sweep(
    model="mlp", version="3", batch_size=2, concurrencies=[1, 3], seconds=None, requests=30, warmup_s=0.05, timeout_s=20
)


@pytest.fixture
def messages(client: InferenceClient) -> list[bytes]:
    metadata = client.model_metadata("mlp")
    return RequestPlan(metadata=metadata, max_batch_size=16, batch_size=2, shapes={}, given={}, version="3").serialized()


def test_the_servers_counters_cover_exactly_what_was_measured(client: InferenceClient, messages: list[bytes]) -> None:
    with LoadGenerator(client.address, messages) as generator:
        levels = list(run_sweep(SWEEP, client, generator))
    assert [(level.concurrency, level.requests, level.errors) for level in levels] == [(1, 30, {}), (3, 30, {})]
    for level in levels:
        assert level.server is not None
        assert (level.server.requests, level.server.rows, level.server.queued) == (30, 60, 30)
        assert level.server.mean_batch_size is not None
        assert 2 <= level.server.mean_batch_size <= 2 * level.concurrency
    assert levels[0].server is not None
    assert levels[0].server.mean_batch_size == 2


def test_a_level_without_success_ends_the_sweep(client: InferenceClient) -> None:
    with LoadGenerator(client.address, [b""]) as generator:
        levels = run_sweep(replace(SWEEP, warmup_s=0), client, generator)
        with pytest.raises(BenchmarkError, match=r"at concurrency 1 no request succeeded \(30 failed\): "):
            next(levels)
