"""The load of a server from the sums that it reports, and the number of members that a cluster needs for it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from halfserve.serve.fleet.control.autoscaling import LOAD_S, LoadMeter, MemberLoad, ScalingOptions, wanted_members
from halfserve.serve.fleet.control.reports import ModelReport

OPTIONS = ScalingOptions(least=1, most=20, busy=0.7, queue_s=0.05, look_back_s=100, step_s=10)


def play(load: Callable[[int, int], MemberLoad], seconds: int, members: int = 4) -> list[int]:
    """The wanted members for each second, where each decision is carried out at once."""
    state: dict[str, Any] = {}
    targets = []
    for now in range(seconds):
        members, state = wanted_members([load(now, members)] * members, members, OPTIONS, state, float(now))
        state = json.loads(json.dumps(state))
        targets.append(members)
    return targets


def busy(total: float, members: int) -> MemberLoad:
    return MemberLoad(busy=min(1.0, total / members))


def test_steady_load_changes_nothing() -> None:
    assert set(play(lambda _, members: busy(2.5, members), 300)) == {4}


def test_one_step_up_to_what_is_needed() -> None:
    targets = play(lambda now, members: busy(2.5 if now < 10 else 3.9, members), 20)
    assert targets[:12] == [4] * 12
    assert set(targets[12:]) == {6}  # 3.9 at 0.7 each


# 4 that compute and what waits or was refused; half as much makes a queue grow
@pytest.mark.parametrize(("load", "wanted"), [(MemberLoad(busy=1.0, queue_s=0.5), 10), (MemberLoad(busy=1.0, refused=0.5), 12)])
def test_queues_and_refusals_add_members_at_once(load: MemberLoad, wanted: int) -> None:
    targets = play(lambda now, members: load if now == 10 else busy(2.5, members), 12)
    assert targets[9:11] == [4, wanted]


def test_asking_more_often_changes_no_decision() -> None:
    loads = [MemberLoad(busy=1.0, queue_s=0.2)] * 4
    state: dict[str, Any] = {}
    for tenth in range(20):
        wanted, state = wanted_members([busy(2.5, 4)] * 4, 4, OPTIONS, state, 10 + tenth / 10)
    often, _ = wanted_members(loads, 4, OPTIONS, state, 12.0)
    _, state = wanted_members([busy(2.5, 4)] * 4, 4, OPTIONS, {}, 11.0)
    seldom, _ = wanted_members(loads, 4, OPTIONS, state, 12.0)
    assert (wanted, often, seldom) == (4, 8, 8)


def test_a_queue_that_does_not_wait_for_compute_adds_nothing() -> None:
    assert max(play(lambda _, __: MemberLoad(busy=0.1, queue_s=1.0), 50)) == 4


def test_members_are_removed_slowly_to_what_was_needed_lately() -> None:
    targets = play(lambda now, members: busy(5.0 if now < 10 else 1.3, members), 400, members=8)
    assert set(targets[:100]) == {8}
    assert targets[-1] == 2
    changes = [now for now in range(1, 400) if targets[now] != targets[now - 1]]
    assert all(targets[now - 1] - targets[now] == 1 for now in changes)
    assert min(later - now for now, later in itertools.pairwise(changes)) >= 10


def test_a_load_that_swings_does_not_swing_the_cluster() -> None:
    targets = play(lambda now, members: busy(4.0 if now // 30 % 2 else 1.0, members), 600)
    assert set(targets[100:]) == {6}


def test_bounds_hold() -> None:
    assert max(play(lambda _, __: MemberLoad(busy=1.0, queue_s=1.0), 60)) == 20
    assert min(play(lambda _, __: MemberLoad(), 600)) == 1


def test_without_members_the_target_stays() -> None:
    assert wanted_members([], 3, OPTIONS, {}, 0.0) == (3, {})


def load_of(*states: tuple[float, dict[str, ModelReport]]) -> MemberLoad:
    meter = LoadMeter()
    for now_s, models in states:
        meter.take(models, 2, now_s)
    return meter.load


def model(requests: int = 0, *, refusals: int = 0, queue_s: float = 0.0, compute_s: float = 0.0) -> ModelReport:
    return ModelReport(requests=requests, refusals=refusals, queue_ns=round(queue_s * 1e9), compute_ns=round(compute_s * 1e9))


@pytest.mark.parametrize(
    ("states", "load"),
    [
        ([(0.0, {})], MemberLoad()),
        ([(0.0, {"a": model()}), (1.0, {"a": model()})], MemberLoad()),
        (
            [
                (0.0, {"a": model()}),
                (1.0, {"a": model(100, queue_s=90.0, compute_s=2.0)}),
                (1.0 + LOAD_S, {"a": model(110, queue_s=91.0, compute_s=2.0 + LOAD_S)}),
            ],
            MemberLoad(busy=0.5, queue_s=0.1),
        ),
        (
            [
                (0.0, {"quick": model(), "slow": model()}),
                (1.0, {"quick": model(1000, compute_s=0.2), "slow": model(10, queue_s=2.0, compute_s=0.8)}),
            ],
            MemberLoad(busy=0.5, queue_s=0.2),
        ),
        (
            [(0.0, {}), (1.0, {"new": model(4, refusals=1, queue_s=0.4, compute_s=1.0)})],
            MemberLoad(busy=0.5, queue_s=0.1, refused=0.2),
        ),
    ],
    ids=["asked nothing", "idle", "what came lately", "a quick model hides no queue", "a new model"],
)
def test_the_load_is_that_of_the_latest_requests(states: list[tuple[float, dict[str, ModelReport]]], load: MemberLoad) -> None:
    assert load_of(*states) == load


def test_a_model_that_computes_little_is_no_reason_for_another_member() -> None:
    before = {"busy": model(), "rare": model()}
    after = {"busy": model(100, queue_s=1.0, compute_s=1.0), "rare": model(1, queue_s=0.5, compute_s=0.01)}
    assert load_of((0.0, before), (1.0, after)).queue_s == 0.01
