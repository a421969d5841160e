"""Which requests share a batch, and what each of them gets."""

from __future__ import annotations

import asyncio

import pytest

from serve.engine.batcher import Batcher
from serve.engine.errors import BackendError, InferenceError
from serve.engine.model import Model
from serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, hold_first, run


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
    s = model.statistics.totals
    assert (
        s.queue.count == s.compute_input.count == s.compute_infer.count == s.compute_output.count == s.success.count == requests
    )
    assert (s.rows, s.batches) == (requests, batches)
    assert s.success.ns >= s.compute_infer.ns > 0
    assert sum(size.compute_infer.count for size in s.by_batch_size.values()) == batches
    assert s.last_inference_ms > 1_700_000_000_000


def test_a_few_requests_wait_for_those_of_the_next_turn_and_a_lone_one_does_not() -> None:
    async def arrive_in_two_turns(batcher: Batcher, answers: Answers, first: list[int], second: list[int]) -> None:
        for value in first:
            batcher.submit(answers.request(value))
        await asyncio.sleep(0)
        for value in second:
            batcher.submit(answers.request(value))

    async def scene(answers: Answers) -> None:
        backend = HeldBackend()
        model = held_model(backend)
        await arrive_in_two_turns(model.batcher, answers, [1, 2], [3])
        await answers.all(3)
        many = list(range(10, 18))
        await arrive_in_two_turns(model.batcher, answers, many, [20])
        await answers.all(12)
        await arrive_in_two_turns(model.batcher, answers, [31], [32])
        await answers.all(14)
        assert backend.batches == [[1, 2, 3], many, [20], [31], [32]]
        await model.batcher.drain()

    run(scene)


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
        assert (model.statistics.totals.fail.count, model.statistics.totals.success.count) == (1, 5)
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


def test_a_batch_is_filled_up_to_the_next_size_and_nobody_sees_it() -> None:
    async def scene(answers: Answers) -> None:
        backend = HeldBackend(held=True)
        model = held_model(backend, preferred_rows=(4, 8), padded_rows=(4, 8))
        await hold_first(backend, model.batcher, answers)
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
        await model.batcher.drain()

    run(scene)
