"""Requests that are refused at the door."""

from __future__ import annotations

import time

import pytest

from serve.engine.errors import DeadlineExceededError, OverloadedError, QueueFullError
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, hold_first, run


def test_a_full_queue_refuses_with_a_hint() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend, max_waiting=2)
        await hold_first(backend, model.batcher, answers)
        model.batcher.submit(answers.request(1))
        model.batcher.submit(answers.request(2))
        with pytest.raises(QueueFullError, match="2 requests wait") as refused:
            model.batcher.submit(answers.request(3))
        assert refused.value.retry_after_s > 0
        backend.release.set()
        await answers.all(3)
        await model.batcher.drain()

    run(scene)


def test_requests_that_wait_in_vain_make_room_in_a_full_queue() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend, max_waiting=2)
        await hold_first(backend, model.batcher, answers)
        model.batcher.submit(answers.request(1, deadline=time.monotonic() - 1))
        model.batcher.submit(answers.request(2))
        model.batcher.submit(answers.request(3))
        assert "the deadline passed while the request waited" in str(answers.error(1))
        assert model.batcher.waiting == 2
        with pytest.raises(QueueFullError):
            model.batcher.submit(answers.request(4))
        assert model.statistics.totals.failures == {"deadline_exceeded": 1, "queue_full": 1}
        backend.release.set()
        await answers.all(4)
        await model.batcher.drain()

    run(scene)


def test_what_cannot_be_answered_within_the_target_is_refused_at_the_door() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend()
        model = held_model(backend, max_rows=1, latency_target_s=30.0)
        model.batcher.submit(answers.request(0))
        await answers.all(1)
        pace, shedding = model.batcher._queue.pace, model.batcher._shedding
        assert pace is not None
        assert shedding is not None
        for _ in range(40):  # it learns what a batch takes
            pace.observe((1,), 1, 0.001)
        backend.release.clear()
        backend.entered.clear()
        await hold_first(backend, model.batcher, answers)
        shedding._plenty_waiting = 0  # a closer look at everybody, as after long batches
        (running,) = shedding.running
        running.likely_end_s = time.monotonic() + 60  # as if it had just begun, and took a minute
        with pytest.raises(
            OverloadedError, match="too long to answer within its target of 30000 ms; retry with back-off"
        ) as refused:
            model.batcher.submit(answers.request(150))
        assert 25 < refused.value.retry_after_s < 35
        # Coming back would not help whoever has set a deadline of its own: it comes closer as fast as the queue shortens.
        with pytest.raises(DeadlineExceededError, match="too long to answer before the deadline, [45]000 ms away; the request"):
            model.batcher.submit(answers.request(151, deadline=time.monotonic() + 5))
        assert model.statistics.totals.failures == {"overloaded": 1, "deadline_exceeded": 1}
        running.likely_end_s = time.monotonic()
        model.batcher.submit(answers.request(152, leave_by=time.monotonic() + 60))
        backend.release.set()
        await answers.all(3)
        assert answers.value(152) == 153
        await model.batcher.drain()

    run(scene)
