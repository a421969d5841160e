from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from protos.model_config_pb2 import ModelConfig
from serve.engine import batcher as batcher_module
from serve.engine.batcher import Batcher
from serve.engine.compute_slots import ComputeSlots
from serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    InferenceError,
    OverloadedError,
    QueueFullError,
    UnavailableError,
)
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.engine.requests import Done, InferRequest
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


class QuickBackend(HeldBackend):
    """On the CPU; notes the thread of each batch."""

    provider = "CPUExecutionProvider"

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def run(self, inputs: Tensors) -> Tensors:
        self.threads.append(threading.get_ident())
        return super().run(inputs)


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
        assert model.statistics.failures == {"deadline_exceeded": 1, "queue_full": 1}
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
        with pytest.raises(OverloadedError, match="too long to answer before the deadline, [45]000 ms away; retry"):
            model.batcher.submit(answers.request(151, deadline=time.monotonic() + 5))
        assert model.statistics.failures == {"overloaded": 2}
        running.likely_end_s = time.monotonic()
        model.batcher.submit(answers.request(152))
        backend.release.set()
        await answers.all(3)
        assert answers.value(152) == 153
        await model.batcher.drain()

    run(scene)


def test_models_that_share_a_slot_take_turns() -> None:
    async def scene(answers: Answers) -> None:
        slots = ComputeSlots(1)
        first, second = HeldBackend(held=True), HeldBackend()
        flood, guest = held_model(first, "flood", max_rows=1), held_model(second, "guest", max_rows=1)
        for model in (flood, guest):
            model.batcher.compete(slots)
        await hold_first(first, flood.batcher, answers)
        for value in range(10):
            flood.batcher.submit(answers.request(value))
        asked = answers.request(50)
        before_it: list[int] = []
        answer = asked.done

        def done(result: Tensors | InferenceError) -> None:
            before_it.append(len(first.batches))
            answer(result)

        asked.done = done
        guest.batcher.submit(asked)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not second.batches, "the slot is taken"
        first.release.set()
        await answers.all(12)
        assert before_it == [1], "it waited for the batch that ran, and for none of the flood"
        assert answers.value(50) == 51
        assert len(first.batches) == 11
        assert slots.free == 1
        await asyncio.gather(flood.batcher.drain(), guest.batcher.drain())

    run(scene)


def test_a_cancelled_request_gives_its_turn_to_the_other_model() -> None:
    async def scene(answers: Answers) -> None:
        slots = ComputeSlots(1)
        backends = [HeldBackend(held=True), HeldBackend(), HeldBackend()]
        models = [held_model(backend, f"m{n}", max_rows=1) for n, backend in enumerate(backends)]
        for model in models:
            model.batcher.compete(slots)
        await hold_first(backends[0], models[0].batcher, answers)
        gone = answers.request(1)
        models[1].batcher.submit(gone)
        models[2].batcher.submit(answers.request(2))
        await asyncio.sleep(0)
        models[1].batcher.cancel(gone)
        backends[0].release.set()
        await answers.all(2)
        assert (answers.value(2), backends[1].batches, slots.free) == (3, [], 1)
        await asyncio.gather(*(model.batcher.drain() for model in models))

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
        assert (model.statistics.rows, model.statistics.batches) == (6, 2)
        await model.batcher.drain()

    run(scene)


def test_models_on_the_cpu_compete_for_the_slots_of_the_server() -> None:
    async def scene(answers: Answers) -> None:
        core = InferenceCore([])
        core.slots = ComputeSlots(1)
        on_cpu, elsewhere = held_model(QuickBackend(), "cpu"), held_model(HeldBackend(), "device")
        core.replace("cpu", [on_cpu])
        core.replace("device", [elsewhere])
        core.replace("cpu", [on_cpu])
        assert (on_cpu.batcher._share is None, elsewhere.batcher._share is None) == (False, True)
        for value, model in enumerate([on_cpu, elsewhere] * 20):
            core.submit(model, answers.request(value))
        await answers.all(40)
        await core.drain()
        assert core.slots.free == 1

    run(scene)
