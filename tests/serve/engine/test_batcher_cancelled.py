"""Requests that are gone, too late or too many."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from serve.engine.errors import DeadlineExceededError
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, hold_first, run


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


@pytest.mark.parametrize("stay", [0, 1])
def test_what_nobody_waited_for_to_the_end_is_no_success(stay: int) -> None:
    """Clients whose timeouts are shorter than the model takes would show as so many successes."""

    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend)
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


@pytest.mark.parametrize("target", [None, 60.0])
def test_a_request_that_waited_for_as_long_as_it_may_is_told_so_and_not_computed(target: float | None) -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend, latency_target_s=target)
        await hold_first(backend, model.batcher, answers)
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
        await model.batcher.drain()

    run(scene)
