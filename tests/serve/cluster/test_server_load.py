"""How busy a server is, from the sums that it reports."""

from __future__ import annotations

from halfserve.protos.agent_pb2 import MemberState, ModelState
from halfserve.serve.cluster.autoscaling import MemberLoad
from halfserve.serve.cluster.server_load import LOAD_S, LoadMeter


def load_of(*states: tuple[float, dict[str, ModelState]]) -> MemberLoad:
    meter = LoadMeter()
    for now_s, models in states:
        meter.take(MemberState(compute_slots=2, models=models), now_s)
    return meter.load


def model(requests: int = 0, *, refusals: int = 0, queue_s: float = 0.0, compute_s: float = 0.0) -> ModelState:
    return ModelState(requests=requests, refusals=refusals, queue_ns=round(queue_s * 1e9), compute_ns=round(compute_s * 1e9))


def test_a_server_that_was_asked_nothing_is_idle() -> None:
    assert load_of((0.0, {})) == load_of((0.0, {"a": model()}), (1.0, {"a": model()})) == MemberLoad()


def test_only_what_came_lately_counts() -> None:
    load = load_of(
        (0.0, {"a": model()}),
        (1.0, {"a": model(100, queue_s=90.0, compute_s=2.0)}),
        (1.0 + LOAD_S, {"a": model(110, queue_s=91.0, compute_s=2.0 + LOAD_S)}),
    )
    assert load == MemberLoad(busy=0.5, queue_s=0.1, refused=0.0)


def test_quick_requests_of_one_model_hide_no_queue_of_another() -> None:
    before = {"quick": model(), "slow": model()}
    after = {"quick": model(1000, compute_s=0.2), "slow": model(10, queue_s=2.0, compute_s=0.8)}
    assert load_of((0.0, before), (1.0, after)) == MemberLoad(busy=0.5, queue_s=0.2, refused=0.0)


def test_a_model_that_computes_little_is_no_reason_for_another_member() -> None:
    before = {"busy": model(), "rare": model()}
    after = {"busy": model(100, queue_s=1.0, compute_s=1.0), "rare": model(1, queue_s=0.5, compute_s=0.01)}
    assert load_of((0.0, before), (1.0, after)).queue_s == 0.01


def test_a_model_that_is_new_counts_from_its_beginning() -> None:
    load = load_of((0.0, {}), (1.0, {"new": model(4, refusals=1, queue_s=0.4, compute_s=1.0)}))
    assert load == MemberLoad(busy=0.5, queue_s=0.1, refused=0.2)
