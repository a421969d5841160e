from __future__ import annotations

import pytest

from protos import inference_pb2 as pb
from serve.benchmark.server_statistics import ServerTotals


def statistics(scale: int) -> pb.ModelStatistics:
    made = pb.ModelStatistics(name="m", version="1", inference_count=40 * scale, execution_count=10 * scale)
    times = made.inference_stats
    fields = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    for field, ns in zip(fields, (9_000_000, 2_000_000, 1_000_000, 3_000_000, 500_000), strict=True):
        getattr(times, field).count, getattr(times, field).ns = 20 * scale, ns * scale
    return made


def test_what_happened_between_two_moments() -> None:
    share = ServerTotals.of([statistics(5)]).since(ServerTotals.of([statistics(2)]))
    assert share is not None
    assert (share.requests, share.mean_batch_size) == (60, 4.0)
    assert share.queue_ms == pytest.approx(0.1)
    assert share.compute_ms == pytest.approx(0.225)


def test_a_server_that_was_started_again_in_between() -> None:
    before = ServerTotals(requests=10_000, rows=10_000, executions=10_000)
    assert ServerTotals(requests=20_000, rows=20_000, executions=5_000).since(before) is None


def test_versions_are_added_up() -> None:
    assert ServerTotals.of([statistics(1), statistics(2)]) == ServerTotals.of([statistics(3)])


def test_a_server_that_did_nothing_has_no_means() -> None:
    idle = ServerTotals.of([statistics(2)]).since(ServerTotals.of([statistics(2)]))
    assert idle is not None
    assert (idle.mean_batch_size, idle.queue_ms, idle.compute_ms) == (None, None, None)


def test_the_time_is_split_by_stage() -> None:
    share = ServerTotals.of([statistics(3)])
    assert share.split_ms == pytest.approx(
        {"queue": 0.1, "compute_input": 0.05, "compute_infer": 0.15, "compute_output": 0.025}
    )
    assert set(ServerTotals().split_ms.values()) == {None}
