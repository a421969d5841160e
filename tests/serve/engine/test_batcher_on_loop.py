"""Batches so short that they run on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest
from google.protobuf import text_format

from protos.model_config_pb2 import ModelConfig
from serve.engine import batcher as batcher_module
from serve.engine.errors import InferenceError
from serve.engine.instances.company import ALONE_AFTER_S
from serve.engine.instances.short_batches import LONE_BYTES, LONE_REQUESTS, LOOP_BYTES, SHORT_S
from serve.engine.model import Model
from serve.engine.requests import Done
from serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, QuickBackend, run


def test_short_batches_move_to_the_event_loop_and_are_answered_there() -> None:
    async def scene(answers: Answers) -> None:
        backend = QuickBackend()
        model = held_model(backend, max_rows=2)
        here, value = threading.get_ident(), 0
        while here not in backend.threads:
            assert value < 20_000, "a batch of one row takes a few microseconds"
            model.batcher.submit(answers.request(value))
            value += 1
            await answers.all(value)
        assert backend.threads[0] != here
        for more in range(5):  # three batches, one after the other
            model.batcher.submit(answers.request(value + more))
        await answers.all(value + 5)
        assert [answers.value(v) for v in range(value + 5)] == [v + 1 for v in range(value + 5)]
        bad = answers.request(-1)
        model.batcher.submit(bad)
        await answers.all(value + 6)
        assert "negative values hurt" in str(answers.error(-1))
        await model.batcher.drain()

    run(scene)


def test_answers_come_in_order_when_batches_move_to_the_event_loop() -> None:
    async def scene(answers: Answers) -> None:
        backend = QuickBackend()
        model = held_model(backend, max_rows=2)
        order: list[int] = []
        here, asked = threading.get_ident(), 0
        while here not in backend.threads:
            assert asked < 20_000, "a batch of two rows takes a few microseconds"
            for _ in range(3):
                request = answers.request(asked, rows=2)
                request.done = partial(_note, order, asked, request.done)
                model.batcher.submit(request)
                asked += 1
            await answers.all(asked)
        assert order == list(range(asked))
        await model.batcher.drain()

    run(scene)


def _note(order: list[int], number: int, done: Done, result: Tensors | InferenceError) -> None:
    order.append(number)
    done(result)


async def learned_short(backend: QuickBackend, model: Model, answers: Answers) -> int:
    """Have the model run on the loop; returns how many requests that took."""
    here, asked = threading.get_ident(), 0
    while here not in backend.threads:
        assert asked < 20_000, "a batch of two rows takes a few microseconds"
        model.batcher.submit(answers.request(asked, rows=2))
        asked += 1
        await answers.all(asked)
    return asked


def test_what_brings_many_bytes_is_copied_on_a_thread_however_short_its_shape_was() -> None:
    async def scene(answers: Answers) -> None:
        backend = QuickBackend()
        model = held_model(backend, max_rows=2)
        asked = await learned_short(backend, model, answers)
        backend.threads.clear()
        for size in (LOOP_BYTES, LOOP_BYTES + 1):
            request = answers.request(asked, rows=2)
            request.size = size
            model.batcher.submit(request)
            asked += 1
            await answers.all(asked)
        assert [thread == threading.get_ident() for thread in backend.threads] == [True, False]
        await model.batcher.drain()

    run(scene)


class Middling(QuickBackend):
    """Takes longer than a short batch may, as the processor's clock has it, and less than one that has the loop to itself."""

    def run(self, inputs: Tensors) -> Tensors:
        began = time.thread_time()
        while time.thread_time() < began + 1.5 * SHORT_S:
            pass
        return super().run(inputs)


@pytest.mark.parametrize(
    ("company", "requests", "request_bytes", "on_loop"),
    [
        (False, LONE_REQUESTS, 10, True),
        (True, 1, 10, False),
        (False, LONE_REQUESTS + 1, 10, False),
        (False, 1, LONE_BYTES + 1, False),
    ],
    ids=["alone", "in company", "many requests", "large requests"],
)
def test_a_small_batch_may_take_longer_on_the_loop_while_the_model_is_alone(
    company: bool, requests: int, request_bytes: int, on_loop: bool
) -> None:
    async def scene(answers: Answers) -> None:
        backend = Middling()
        model = held_model(backend, max_rows=16, short_s={16: 2 * SHORT_S})
        model.batcher.company.is_alone(model.batcher, -ALONE_AFTER_S)
        if company:
            model.batcher.company.is_alone("another", -1.0)
        for value in range(requests):
            request = answers.request(value)
            request.size = request_bytes
            model.batcher.submit(request)
        await answers.all(requests)
        assert backend.threads == [threading.get_ident()] if on_loop else threading.get_ident() not in backend.threads
        await model.batcher.drain()

    run(scene)


@pytest.mark.parametrize(("turn_s", "answered_at_once"), [(60.0, 30), (1e-9, 1)])
def test_a_turn_of_the_loop_computes_for_a_bounded_time(
    turn_s: float, answered_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(answers: Answers) -> None:
        backend = QuickBackend()
        model = held_model(backend, max_rows=2)
        asked = await learned_short(backend, model, answers)
        monkeypatch.setattr(batcher_module, "TURN_S", turn_s)
        monkeypatch.setattr(batcher_module, "LONGEST_TURN_S", turn_s)
        for value in range(30):
            model.batcher.submit(answers.request(100_000 + value, rows=2))
        await asyncio.sleep(0)
        assert sum(map(len, answers.results.values())) == asked + answered_at_once
        await answers.all(asked + 30)
        await model.batcher.drain()

    run(scene)


def test_a_model_under_watch_stays_on_its_thread() -> None:
    config = text_format.Parse('parameters { key: "halfserve.max_compute_s" value { string_value: "9" } }', ModelConfig())
    backend = QuickBackend()
    config.max_batch_size = 2
    assert not held_model(backend, config=config, max_rows=2).batcher.instances[0].may_run_on_loop
    assert held_model(backend, max_rows=2).batcher.instances[0].may_run_on_loop
    assert not held_model(HeldBackend(), max_rows=2).batcher.instances[0].may_run_on_loop, "not on the CPU"
