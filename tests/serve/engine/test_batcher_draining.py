"""The end of a model: what was taken is finished."""

from __future__ import annotations

import asyncio

import pytest

from serve.engine.errors import UnavailableError
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, hold_first, run


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
