"""Requests whose time runs out while no instance is free are answered then, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

import numpy as np
import pytest

from halfserve.serve.engine.backend import Outcome, RequestBackend
from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.errors import DeadlineExceededError, InferenceError, OverloadedError
from halfserve.serve.engine.execution.runners import make_instance
from halfserve.serve.engine.execution.tensor_runner import Supervision
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from halfserve.serve.engine.queueing.deadline_timer import ROUNDING_S, SWEEP_S, DeadlineTimer
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import BegunBatch
from halfserve.serve.engine.tensors import Tensors
from tests.serve.simulated_cluster.virtual_time import run_virtually

BATCH_S = 10.0
SOON_S = SWEEP_S + 2 * ROUNDING_S


class SlowBackend(RequestBackend):
    """Each batch takes BATCH_S of virtual time; no thread waits for it."""

    provider = "test"
    precision = "fp32"

    def __init__(self) -> None:
        self.batches: list[int] = []

    def begin(self, requests: Sequence[InferRequest], batch: BegunBatch) -> bool:
        self.batches.append(len(requests))
        asyncio.get_running_loop().call_later(BATCH_S, partial(batch.ready, at_once=True))
        return True

    def compute(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        return [{"y": np.zeros((request.rows, 1), np.float32)} for request in requests]


class Scene:
    """A model of one slow instance, and what its requests got when.

    Attributes:
        ends: result of each request and its time, in seconds from the start, by the request's name.
    """

    def __init__(self, clock: Callable[[], float], **limits: float) -> None:
        self.backend = SlowBackend()
        self.statistics = Statistics()
        instance = make_instance(self.backend, 0, Supervision(label="slow/1"))
        self.batcher = Batcher([instance], BatchLimits(max_rows=8, **limits), self.statistics)  # type: ignore[arg-type]
        self.ends: dict[str, tuple[type[object], float]] = {}
        self._clock, self._began = clock, clock()

    def send(self, name: str, *, deadline: float | None = None, leave_by: float | None = None) -> InferRequest:
        """Submit a request; its times are in seconds from the start."""

        def done(result: Tensors | InferenceError) -> None:
            assert name not in self.ends
            kind = type(result) if isinstance(result, InferenceError) else dict
            self.ends[name] = kind, self._clock() - self._began

        request = InferRequest(
            {"x": np.zeros((1, 1), np.float32)},
            ("y",),
            1,
            (1,),
            None if deadline is None else self._began + deadline,
            done,
            leave_by=None if leave_by is None else self._began + leave_by,
            arrived_ns=round(self._clock() * 1e9),
        )
        self.batcher.submit(request)
        return request

    def check(self, name: str, kind: type[object], at_s: float) -> None:
        """Check that a request got this kind of result at this time, or within SOON_S."""
        got, ended_s = self.ends[name]
        assert got is kind
        assert at_s <= ended_s <= at_s + SOON_S, (name, ended_s)


def play(monkeypatch: pytest.MonkeyPatch, play_scene: Callable[[Scene], Coroutine[None, None, None]], **limits: float) -> Scene:
    """Play a scene in virtual time until the model has drained."""

    async def main(clock: Callable[[], float]) -> Scene:
        monkeypatch.setattr(time, "monotonic", clock)
        scene = Scene(clock, **limits)
        await play_scene(scene)
        await scene.batcher.drain()
        monkeypatch.undo()
        return scene

    return run_virtually(main)


def test_late_requests_are_answered_while_the_instance_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene_of(scene: Scene) -> None:
        scene.send("running")
        await asyncio.sleep(1)
        scene.send("patient", leave_by=9.0)
        scene.send("timeout", leave_by=1.1)
        scene.send("deadline", deadline=1.3)
        await asyncio.sleep(1)
        scene.send("later", deadline=2.5, leave_by=3.0)
        scene.send("unbounded")

    scene = play(monkeypatch, scene_of)
    for name, end_s in (("timeout", 1.1), ("deadline", 1.3), ("later", 2.5), ("patient", 9.0)):
        scene.check(name, DeadlineExceededError, end_s)
    scene.check("unbounded", dict, 2 * BATCH_S)
    assert scene.backend.batches == [1, 1]
    assert scene.statistics.totals.failures == {"deadline_exceeded": 4}


def test_a_request_that_is_cancelled_is_not_answered_by_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene_of(scene: Scene) -> None:
        scene.send("running")
        await asyncio.sleep(1)
        gone = scene.send("gone", leave_by=2.0)
        scene.send("late", leave_by=2.0)
        scene.batcher.cancel(gone)

    scene = play(monkeypatch, scene_of)
    scene.check("late", DeadlineExceededError, 2.0)
    assert scene.ends.keys() == {"running", "late"}
    assert scene.statistics.totals.failures == {"cancelled": 1, "deadline_exceeded": 1}


def test_a_latency_target_ends_the_wait_for_a_busy_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene_of(scene: Scene) -> None:
        scene.send("running")
        await asyncio.sleep(1)
        scene.send("late")

    scene = play(monkeypatch, scene_of, latency_target_s=0.5)
    scene.check("late", OverloadedError, 1.5)


def test_late_requests_are_answered_while_another_model_has_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene_of(scene: Scene) -> None:
        slots = ComputeSlots(1)
        scene.batcher.compete(slots)
        other = slots.join(lambda: None)
        assert other.claim()
        scene.send("late", leave_by=0.1)
        scene.send("unbounded")
        await asyncio.sleep(1)
        scene.check("late", DeadlineExceededError, 0.1)
        other.give_back(1.0)

    scene = play(monkeypatch, scene_of)
    scene.check("unbounded", dict, 1 + BATCH_S)


def test_many_deadlines_need_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: Callable[[], float]) -> tuple[int, set[float]]:
        monkeypatch.setattr(time, "monotonic", clock)
        searches, began = 0, clock()
        waiting = {began + 0.001 * number for number in range(1, 1000)}

        def drop_late(now: float) -> None:
            nonlocal searches
            searches += 1
            for moment in sorted(waiting):
                if moment <= now:
                    waiting.discard(moment)
                    assert now <= moment + SOON_S
                else:
                    timer.watch(None, moment)

        timer = DeadlineTimer(drop_late)
        for moment in sorted(waiting, reverse=True):
            timer.watch(moment)
        await asyncio.sleep(2)
        monkeypatch.undo()
        return searches, waiting

    searches, waiting = run_virtually(main)
    assert not waiting
    assert searches <= 1 / SWEEP_S + 1
