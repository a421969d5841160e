from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from serve.engine.batcher import Batcher
from serve.engine.errors import BackendError, DeadlineExceededError, InferenceError, QueueFullError, UnavailableError
from serve.engine.model import Model
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model


class Answers:
    """Requests with consecutive values, and what became of each."""

    def __init__(self) -> None:
        self.results: dict[float, list[Tensors | InferenceError]] = {}
        self._news = asyncio.Event()

    def request(self, value: float, *, deadline: float | None = None, rows: int = 1) -> InferRequest:
        results = self.results.setdefault(value, [])

        def done(result: Tensors | InferenceError) -> None:
            results.append(result)
            self._news.set()

        x = np.full((rows, 1), value, np.float32)
        return InferRequest(inputs={"x": x}, outputs=("y",), rows=rows, bucket=(1,), deadline=deadline, done=done)

    async def all(self, count: int) -> None:
        while sum(map(len, self.results.values())) < count:
            await asyncio.wait_for(self._news.wait(), 20)
            self._news.clear()

    def value(self, of: float) -> Any:
        (result,) = self.results[of]
        assert not isinstance(result, InferenceError), result
        return float(result["y"][0, 0])

    def error(self, of: float) -> InferenceError:
        (result,) = self.results[of]
        assert isinstance(result, InferenceError)
        return result


def run(test: Callable[[Answers], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(Answers())

    asyncio.run(main())


async def hold_first(backend: HeldBackend, batcher: Batcher, answers: Answers) -> None:
    """Occupy the worker, so that what comes next has to queue."""
    batcher.submit(answers.request(100))
    assert await asyncio.to_thread(backend.entered.wait, 20)


def test_requests_that_arrive_while_a_batch_runs_share_the_next_one() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend)
        await hold_first(backend, model.batcher, answers)
        for value in range(5):
            model.batcher.submit(answers.request(value))
        backend.release.set()
        await answers.all(6)
        assert backend.batches == [[100], [0, 1, 2, 3, 4]]
        assert [answers.value(v) for v in range(5)] == [1, 2, 3, 4, 5]
        check_statistics(model, requests=6, batches=2)
        await model.batcher.drain()

    run(scene)


def check_statistics(model: Model, *, requests: int, batches: int) -> None:
    s = model.statistics
    assert (
        s.queue.count == s.compute_input.count == s.compute_infer.count == s.compute_output.count == s.success.count == requests
    )
    assert (s.rows, s.batches) == (requests, batches)
    assert s.success.ns >= s.compute_infer.ns > 0
    assert sum(size.compute_infer.count for size in s.by_batch_size.values()) == batches
    assert s.last_inference_ms > 1_700_000_000_000


def test_only_the_bad_request_of_a_batch_fails() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend)
        await hold_first(backend, model.batcher, answers)
        for value in (0, 1, -7, 3, 4):
            model.batcher.submit(answers.request(value))
        backend.release.set()
        await answers.all(6)
        assert [answers.value(v) for v in (0, 1, 3, 4)] == [1, 2, 4, 5]
        assert isinstance(answers.error(-7), BackendError)
        assert "negative values hurt" in str(answers.error(-7))
        assert (model.statistics.fail.count, model.statistics.success.count) == (1, 5)
        await model.batcher.drain()

    run(scene)


def test_a_cancelled_request_leaves_the_queue_and_is_never_called_back() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend)
        await hold_first(backend, model.batcher, answers)
        requests = [answers.request(v) for v in range(3)]
        for request in requests:
            model.batcher.submit(request)
        model.batcher.cancel(requests[1])
        assert model.batcher.waiting == 2
        backend.release.set()
        await answers.all(3)
        assert backend.batches[1] == [0, 2]
        assert (answers.value(0), answers.value(2), answers.results[1]) == (1, 3, [])
        await model.batcher.drain()

    run(scene)


def test_a_request_cancelled_while_it_runs_does_not_disturb_its_batch_mates() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend)
        first, second = answers.request(1), answers.request(2)
        model.batcher.submit(first)
        model.batcher.submit(second)
        assert await asyncio.to_thread(backend.entered.wait, 20)
        model.batcher.cancel(first)
        backend.release.set()
        await answers.all(1)
        assert (answers.results[1], answers.value(2)) == ([], 3)
        await model.batcher.drain()

    run(scene)


def test_a_callback_that_raises_does_not_disturb_its_batch_mates(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(answers: Answers) -> None:
        model = held_model(HeldBackend())
        broken = answers.request(1)

        def fail(_: Tensors | InferenceError) -> None:
            raise RuntimeError("the client's socket exploded")

        broken.done = fail
        model.batcher.submit(broken)
        model.batcher.submit(answers.request(2))
        await answers.all(1)
        assert answers.value(2) == 3
        assert "socket exploded" in caplog.text
        await model.batcher.drain()

    run(scene)


def test_an_expired_request_is_answered_without_being_computed() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend)
        await hold_first(backend, model.batcher, answers)
        model.batcher.submit(answers.request(1, deadline=time.monotonic() - 0.001))
        model.batcher.submit(answers.request(2, deadline=time.monotonic() + 60))
        backend.release.set()
        await answers.all(3)
        assert isinstance(answers.error(1), DeadlineExceededError)
        assert backend.batches == [[100], [2]]
        await model.batcher.drain()

    run(scene)


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


def test_draining_finishes_what_was_taken_and_refuses_the_rest() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend)
        await hold_first(backend, model.batcher, answers)
        model.batcher.submit(answers.request(1))
        draining = asyncio.create_task(model.batcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            model.batcher.submit(answers.request(2))
        assert not draining.done()
        backend.release.set()
        await asyncio.wait_for(draining, 20)
        assert (answers.value(100), answers.value(1)) == (101, 2)

    run(scene)


def test_draining_does_not_wait_for_batches_to_fill() -> None:
    async def scene(answers: Answers) -> None:
        model = held_model(HeldBackend(), max_delay_s=3600.0)
        model.batcher.submit(answers.request(1))
        await asyncio.wait_for(model.batcher.drain(), 20)
        assert answers.value(1) == 2

    run(scene)


def test_draining_does_not_wait_for_a_request_that_was_cancelled() -> None:
    async def scene(answers: Answers) -> None:
        model = held_model(HeldBackend(), max_delay_s=3600.0)
        request = answers.request(1)
        model.batcher.submit(request)
        draining = asyncio.create_task(model.batcher.drain())
        await asyncio.sleep(0)
        model.batcher.cancel(request)
        await asyncio.wait_for(draining, 20)
        assert answers.results == {1: []}

    run(scene)


def test_a_queue_delay_lets_a_batch_fill() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend()
        model = held_model(backend, max_rows=4, max_delay_s=30.0)
        for value in range(3):
            model.batcher.submit(answers.request(value))
            await asyncio.sleep(0)
        assert not backend.entered.is_set()
        model.batcher.submit(answers.request(3))
        await answers.all(4)
        assert backend.batches == [[0, 1, 2, 3]]
        await model.batcher.drain()

    run(scene)


def test_a_queue_delay_ends_when_the_batch_is_not_full() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend()
        model = held_model(backend, max_rows=4, max_delay_s=0.01)
        model.batcher.submit(answers.request(5, rows=2))
        await answers.all(1)
        assert backend.batches == [[5, 5]]
        await model.batcher.drain()

    run(scene)
