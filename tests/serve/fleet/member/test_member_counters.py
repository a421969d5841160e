from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.inference_core import ON_DEMAND
from halfserve.serve.fleet.launch.supervision import check_room, process_count
from halfserve.serve.fleet.member.fleet_commands import merge_index
from halfserve.serve.fleet.member.member_counters import MemberCounters, add_statistics, merge_metrics
from halfserve.serve.fleet.member.member_socket import read_counters
from halfserve.serve.protocol.rpcs import model_statistics
from tests.serve.running_server import RunningServer

Answer = pb.ModelStatisticsResponse
BATCHES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 10**12)), max_size=6)


def statistics(batches: Sequence[tuple[int, int]], name: str = "m") -> Answer:
    """Of a model that computed batches of so many rows in so many nanoseconds."""
    answer = Answer()
    one = answer.model_stats.add(name=name, version="1", inference_count=sum(rows for rows, _ in batches))
    for field in pb.InferStatistics.DESCRIPTOR.fields:
        getattr(one.inference_stats, field.name).SetInParent()
    one.execution_count = one.inference_stats.success.count = len(batches)
    one.inference_stats.success.ns = sum(ns for _, ns in batches)
    for size in sorted({rows for rows, _ in batches}):
        own = [ns for rows, ns in batches if rows == size]
        spent = pb.StatisticDuration(count=len(own), ns=sum(own))
        one.batch_stats.add(batch_size=size, compute_input=spent, compute_infer=spent, compute_output=spent)
    return answer


@given(BATCHES, BATCHES, BATCHES)
def test_statistics_of_members_are_those_of_one_server(
    first: list[tuple[int, int]], second: list[tuple[int, int]], third: list[tuple[int, int]]
) -> None:
    total = statistics(first)
    add_statistics(total, [statistics(second), statistics(third), statistics(second, "of another model")])
    assert total == statistics([*first, *second, *third])


def index(*states: str, reason: str = "") -> pb.RepositoryIndexResponse:
    found = pb.RepositoryIndexResponse()
    for version, state in enumerate(states, 1):
        found.models.add(name="m", version=str(version), state=state, reason=reason)
    return found


@pytest.mark.parametrize(
    ("others", "state", "reason"),
    [
        (index("READY"), "READY", ""),
        (index("LOADING"), "LOADING", "process 2"),
        (index("UNAVAILABLE", reason="no memory"), "UNAVAILABLE", "process 2: no memory"),
        (index(), "UNAVAILABLE", "process 2: it has no such version now"),
    ],
)
def test_a_version_is_in_the_worst_state_of_all(others: pb.RepositoryIndexResponse, state: str, reason: str) -> None:
    (merged,) = merge_index(index("READY"), {"process 2": others}, ready=False).models
    assert (merged.state, merged.reason) == (state, reason)
    assert len(merge_index(index("READY"), {"process 2": others}, ready=True).models) == (state == "READY")


def test_a_member_whose_requests_load_a_model_does_not_count() -> None:
    resting = pb.RepositoryIndexResponse()
    resting.models.add(name="m", state="UNAVAILABLE", reason=ON_DEMAND)
    for own, other in ((index("READY"), resting), (resting, index("READY"))):
        assert merge_index(own, {"process 2": other}, ready=True).models == index("READY").models
    assert merge_index(resting, {"process 2": resting}, ready=False) == resting
    (refused,) = merge_index(resting, {"process 2": index("UNAVAILABLE", reason="no memory")}, ready=False).models
    assert (refused.version, refused.reason) == ("1", "no memory")


def metric(name: str, kind: str, value: float, **labels: str) -> Metric:
    made = Metric(name, "", kind)
    made.add_sample(name, labels, value)
    return made


@pytest.mark.parametrize(
    ("name", "kind", "merged"),
    [
        ("nv_inference_count", "counter", 5),
        ("halfserve_queue_depth", "gauge", 5),
        ("halfserve_ready", "gauge", 2),
        ("halfserve_last_inference_timestamp_seconds", "gauge", 3),
        ("nv_cpu_memory_used_bytes", "gauge", 2),
    ],
)
def test_metrics_are_added_up_where_that_means_something(name: str, kind: str, merged: float) -> None:
    (found,) = merge_metrics([metric(name, kind, 2, model="m")], [[metric(name, kind, 3, model="m")]])
    assert [sample.value for sample in found.samples] == [merged]


def test_the_quantiles_told_are_those_of_the_slowest_member() -> None:
    own, others = (
        [metric("nv_inference_queue_summary_us", "summary", value, model="m", quantile="0.5") for value in values]
        for values in ([math.nan], [3, 2])
    )
    (found,) = merge_metrics(own, [[one] for one in others])
    assert [sample.value for sample in found.samples] == [3]


def test_counters_of_models_that_are_not_served_here_are_left_out() -> None:
    (found,) = merge_metrics([metric("a", "counter", 2, model="m")], [[metric("a", "counter", 3, model="gone")]])
    assert [(sample.labels, sample.value) for sample in found.samples] == [({"model": "m"}, 2)]


def test_counters_are_read_as_they_were_written(server: RunningServer) -> None:
    counters = server.run(read_counters(server.core))
    names = [one.name for one in counters.metrics]
    assert len(names) == len(set(names))
    assert MemberCounters.from_bytes(counters.to_bytes()) == counters
    assert server.call(lambda: [model_statistics(model) for model in server.core.models()]) == list(
        counters.statistics.model_stats
    )


def test_auto_is_a_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr("halfserve.serve.engine.resource_limits.group_folders", lambda *_: [])
    assert process_count("auto", use_gpu=False) == 3
    monkeypatch.setattr("halfserve.serve.fleet.launch.supervision.device_count", lambda: 1)
    assert process_count("auto", use_gpu=True) == 1
    check_room(1)
