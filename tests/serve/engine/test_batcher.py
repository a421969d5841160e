"""From submitted requests to their answers: batches, cancellation, draining, delivery."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
import weakref

import numpy as np
import pytest

from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.dispatch.delivery import Delivery
from halfserve.serve.engine.errors import BackendError, DeadlineExceededError, InferenceError, UnavailableError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.batch_queue import BatchQueue
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import LostRequests
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend
from tests.serve.engine.scene import Answers, QuickBackend


async def test_requests_that_arrive_while_a_batch_runs_share_the_next_one(answers: Answers) -> None:
    backend, model = await answers.busy_model()
    answers.submit(model, *range(5))
    backend.release.set()
    await answers.all(6)
    assert backend.batches == [[100], [0, 1, 2, 3, 4]]
    assert [answers.value(v) for v in range(5)] == [1, 2, 3, 4, 5]
    check_statistics(model, requests=6, batches=2)


def check_statistics(model: Model, *, requests: int, batches: int) -> None:
    s = model.statistics.totals
    assert (
        s.queue.count == s.compute_input.count == s.compute_infer.count == s.compute_output.count == s.success.count == requests
    )
    assert (s.rows, s.batches) == (requests, batches)
    assert s.success.ns >= s.compute_infer.ns > 0
    assert sum(size.compute_infer.count for size in s.by_batch_size.values()) == batches
    assert s.last_inference_ms > 1_700_000_000_000


async def test_a_few_requests_wait_one_turn_for_more_and_a_single_one_does_not(answers: Answers) -> None:
    async def arrive_in_two_turns(batcher: Batcher, answers: Answers, first: list[int], second: list[int]) -> None:
        for value in first:
            batcher.submit(answers.request(value))
        await asyncio.sleep(0)
        for value in second:
            batcher.submit(answers.request(value))

    backend = HeldBackend()
    model = answers.model(backend)
    await arrive_in_two_turns(model.batcher, answers, [1, 2], [3])
    await answers.all(3)
    many = list(range(10, 18))
    await arrive_in_two_turns(model.batcher, answers, many, [20])
    await answers.all(12)
    await arrive_in_two_turns(model.batcher, answers, [31], [32])
    await answers.all(14)
    assert backend.batches == [[1, 2, 3], many, [20], [31], [32]]


async def test_a_lone_short_request_can_be_joined_and_cancelled_in_its_turn(answers: Answers) -> None:
    backend = QuickBackend()
    model = answers.model(backend, short_s={8: 1e-6})
    batcher = model.batcher
    cancelled = answers.request(7)
    batcher.submit(cancelled)
    assert batcher.waiting == 1
    batcher.cancel(cancelled)
    assert batcher.waiting == 0
    await asyncio.sleep(0)
    batcher.submit(answers.request(1))
    await answers.all(1)
    for value in (2, 3):
        batcher.submit(answers.request(value))
    assert batcher.waiting == 2
    await answers.all(3)
    assert backend.batches == [[1], [2, 3]]
    assert answers.results[7] == []
    totals = model.statistics.totals
    assert (totals.success.count, totals.fail.count, totals.batches) == (3, 1, 2)
    batcher.submit(answers.request(4))
    await batcher.drain()
    assert answers.value(4) == 5
    assert backend.threads[0] == threading.get_ident()  # a stall of the machine may send later ones to a thread


async def test_only_the_bad_request_of_a_batch_fails(answers: Answers) -> None:
    backend, model = await answers.busy_model()
    answers.submit(model, 0, 1, -7, 3, 4)
    backend.release.set()
    await answers.all(6)
    assert [answers.value(v) for v in (0, 1, 3, 4)] == [1, 2, 4, 5]
    assert isinstance(answers.error(-7), BackendError)
    assert "negative values hurt" in str(answers.error(-7))
    assert (model.statistics.totals.fail.count, model.statistics.totals.success.count) == (1, 5)


async def test_a_callback_that_raises_does_not_disturb_its_batch_mates(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    model = answers.model()
    broken = answers.request(1)

    def fail(_: Tensors | InferenceError) -> None:
        raise RuntimeError("the client's socket exploded")

    broken.done = fail
    model.batcher.submit(broken)
    model.batcher.submit(answers.request(2))
    await answers.all(1)
    assert answers.value(2) == 3
    assert "socket exploded" in caplog.text


async def test_a_queue_delay_lets_a_batch_fill(answers: Answers) -> None:
    backend = HeldBackend()
    model = answers.model(backend, max_rows=4, max_delay_s=30.0)
    for value in range(3):
        answers.submit(model, value)
        await asyncio.sleep(0)
    assert not backend.entered.is_set()
    model.batcher.submit(answers.request(3))
    await answers.all(4)
    assert backend.batches == [[0, 1, 2, 3]]


async def test_a_queue_delay_ends_when_the_batch_is_not_full(answers: Answers) -> None:
    backend = HeldBackend()
    model = answers.model(backend, max_rows=4, max_delay_s=0.01)
    model.batcher.submit(answers.request(5, rows=2))
    await answers.all(1)
    assert backend.batches == [[5, 5]]


async def test_a_batch_is_padded_to_the_next_size(answers: Answers) -> None:
    backend, model = await answers.busy_model(preferred_rows=(4, 8), padded_rows=(4, 8))
    for value in (1, 2, 3):
        model.batcher.submit(answers.request(value, rows=2 if value == 2 else 1))
    model.batcher.submit(answers.request(4))
    backend.release.set()
    await answers.all(5)
    assert backend.batches == [[100] * 4, [1, 2, 2, 3, 4, 4, 4, 4]]
    assert [answers.value(v) for v in (1, 2, 3, 4)] == [2, 3, 4, 5]
    (two,) = answers.results[2]
    assert not isinstance(two, InferenceError)
    assert two["y"].shape == (2, 1)
    assert (model.statistics.totals.rows, model.statistics.totals.batches) == (6, 2)


async def test_draining_finishes_accepted_requests_and_refuses_new_ones(answers: Answers) -> None:
    backend, model = await answers.busy_model()
    model.batcher.submit(answers.request(1))
    draining = asyncio.create_task(model.batcher.drain())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="shutting down"):
        model.batcher.submit(answers.request(2))
    assert not draining.done()
    backend.release.set()
    await asyncio.wait_for(draining, 60)
    assert (answers.value(100), answers.value(1)) == (101, 2)


async def test_draining_does_not_wait_for_batches_to_fill(answers: Answers) -> None:
    model = answers.model(max_delay_s=3600.0)
    model.batcher.submit(answers.request(1))
    await asyncio.wait_for(model.batcher.drain(), 60)
    assert answers.value(1) == 2


async def test_draining_does_not_wait_for_a_request_that_was_cancelled(answers: Answers) -> None:
    model = answers.model(max_delay_s=3600.0)
    request = answers.request(1)
    model.batcher.submit(request)
    draining = asyncio.create_task(model.batcher.drain())
    await asyncio.sleep(0)
    model.batcher.cancel(request)
    await asyncio.wait_for(draining, 60)
    assert answers.results == {1: []}


async def test_a_cancelled_request_leaves_the_queue_and_is_never_called_back(answers: Answers) -> None:
    backend, model = await answers.busy_model()
    requests = [answers.request(v) for v in range(3)]
    for request in requests:
        model.batcher.submit(request)
    model.batcher.cancel(requests[1])
    assert model.batcher.waiting == 2
    backend.release.set()
    await answers.all(3)
    assert backend.batches[1] == [0, 2]
    assert (answers.value(0), answers.value(2), answers.results[1]) == (1, 3, [])


async def test_cancelling_a_running_request_leaves_its_batch_mates_alone(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = answers.model(backend)
    first, second = answers.request(1), answers.request(2)
    model.batcher.submit(first)
    model.batcher.submit(second)
    assert await asyncio.to_thread(backend.entered.wait, 20)
    model.batcher.cancel(first)
    backend.release.set()
    await answers.all(1)
    assert (answers.results[1], answers.value(2)) == ([], 3)


@pytest.mark.parametrize("stay", [0, 1])
async def test_cancelled_requests_do_not_count_as_successes(answers: Answers, stay: int) -> None:
    """Timeouts shorter than the model's time would otherwise count as successes."""
    backend = HeldBackend(held=True)
    model = answers.model(backend)
    requests = [answers.request(value) for value in range(2)]
    for request in requests:
        model.batcher.submit(request)
    assert await asyncio.to_thread(backend.entered.wait, 20)
    for request in requests[stay:]:
        model.batcher.cancel(request)
    backend.release.set()
    await model.batcher.drain()
    totals = model.statistics.totals
    assert (totals.success.count, totals.queue.count, totals.compute_infer.count) == (stay, stay, stay)
    assert (totals.rows, totals.batches, totals.failures) == (2, 1, {"cancelled": 2 - stay})
    assert model.statistics.histograms()["total"].count == stay


async def test_an_expired_request_is_answered_without_being_computed(answers: Answers) -> None:
    backend, model = await answers.busy_model()
    model.batcher.submit(answers.request(1, deadline=time.monotonic() - 0.001))
    model.batcher.submit(answers.request(2, deadline=time.monotonic() + 60))
    backend.release.set()
    await answers.all(3)
    assert isinstance(answers.error(1), DeadlineExceededError)
    assert backend.batches == [[100], [2]]


@pytest.mark.parametrize("target", [None, 60.0])
async def test_a_request_past_its_queue_timeout_is_not_computed(answers: Answers, target: float | None) -> None:
    backend, model = await answers.busy_model(latency_target_s=target)
    request = answers.request(1)
    request.leave_by = request.arrived_ns / 1e9 + 0.000_001
    model.batcher.submit(request)
    backend.release.set()
    await answers.all(2)
    assert isinstance(answers.error(1), DeadlineExceededError)
    assert re.fullmatch(
        r"the request waited \d+\.\d ms in the queue, longer than its timeout allows; it was not computed: send "
        "it again later, or with a longer timeout",
        str(answers.error(1)),
    )
    assert backend.batches == [[100]]


SORRY = UnavailableError("send it again")
FAULT = "an illegal memory access"


class Scene:
    """A delivery, and what it has given to whom."""

    def __init__(self, max_waiting: int = 10) -> None:
        self.queue = BatchQueue(BatchLimits(max_rows=8, max_waiting=max_waiting))
        self.statistics = Statistics()
        self.delivery = Delivery(self.queue, self.statistics)
        self.given: list[tuple[str, str]] = []

    def request(self, name: str) -> InferRequest:
        def done(result: Tensors | InferenceError) -> None:
            self.given.append((name, str(result) if isinstance(result, InferenceError) else str(result["y"][0])))

        return InferRequest({"x": np.zeros((1, 1))}, ("y",), 1, (1,), None, done)


def test_a_request_cancelled_before_its_replay_is_dropped() -> None:
    scene = Scene()
    request = scene.request("a")
    scene.delivery.add([LostRequests([request], SORRY, FAULT)], 1)
    assert scene.delivery.deliver()
    request.cancelled = True
    assert scene.queue.waiting.remove(request)
    alive = weakref.ref(request.inputs["x"])
    del request
    gc.collect()
    assert alive() is None


def test_requests_beyond_the_queue_are_not_replayed() -> None:
    scene = Scene(max_waiting=1)
    scene.queue.offer(scene.request("b"))
    scene.delivery.add([LostRequests([scene.request("a")], SORRY, FAULT)], 1)
    assert not scene.delivery.deliver()
    assert scene.statistics.totals.fail.count == 1
    assert scene.given == [("a", "send it again")]
