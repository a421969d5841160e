"""Short batches run on the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from functools import partial

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.dispatch import dispatcher
from halfserve.serve.engine.dispatch.short_batches import (
    AFTER_STALL,
    ALONE_AFTER_S,
    FIRST,
    LONE_BYTES,
    LONE_REQUESTS,
    LOOP_BYTES,
    MAX_SIZES,
    SHORT_S,
    STALL_S,
    STANDSTILL_S,
    LoopOccupancy,
    ShortBatches,
)
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import Done
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, QuickBackend

SHORT, LONG = SHORT_S / 2, SHORT_S * 2


def learned(seconds: float = SHORT, rows: int = 4, batches: int = FIRST) -> ShortBatches:
    short = ShortBatches()
    for _ in range(batches):
        short.ran_on_thread("a", rows, seconds)
    return short


def test_the_first_batches_run_on_a_thread() -> None:
    assert not ShortBatches().suits("a", 4)
    assert not learned(batches=FIRST - 1).suits("a", 4)
    assert learned().suits("a", 4)


def test_a_known_time_holds_for_every_smaller_size() -> None:
    short = ShortBatches({2: SHORT, 8: SHORT_S, 16: LONG})
    assert [short.suits("a", rows) for rows in (1, 2, 5, 8, 16, 17)] == [True, True, True, True, False, False]
    for _ in range(20):
        short.ran_on_loop("a", 5, LONG, LONG)
    assert not short.suits("a", 5), "what is seen later counts for more"


def test_learned_times_hold_for_one_shape_and_about_one_size() -> None:
    short = learned()
    assert (short.suits("a", 7), short.suits("a", 8), short.suits("b", 4)) == (True, False, False)


def test_long_batches_stay_on_the_thread() -> None:
    short = learned(LONG, batches=1000)
    assert not short.suits("a", 4)


def test_on_the_thread_the_shortest_counts() -> None:
    short = learned(10 * LONG)
    short.ran_on_thread("a", 4, SHORT)  # the others waited for Python's lock
    assert short.suits("a", 4)
    for _ in range(20):
        short.ran_on_thread("a", 4, 10 * LONG)
    assert not short.suits("a", 4), "but not for ever"


def test_batches_that_become_longer_go_back_to_the_thread() -> None:
    short = learned()
    for _ in range(20):
        short.ran_on_loop("a", 4, LONG, LONG)
    assert not short.suits("a", 4)


def test_time_that_other_programs_had_the_core_does_not_count() -> None:
    short = learned()
    for _ in range(20):
        short.ran_on_loop("a", 4, SHORT, STANDSTILL_S)
    assert short.suits("a", 4)


@pytest.mark.parametrize(("spent_s", "clock_s"), [(2 * STALL_S, 2 * STALL_S), (SHORT, 2 * STANDSTILL_S)])
def test_a_stall_of_the_loop_is_not_soon_repeated(spent_s: float, clock_s: float) -> None:
    short = learned()
    short.ran_on_loop("a", 4, spent_s, clock_s)
    for _ in range(AFTER_STALL - 1):
        short.ran_on_thread("a", 4, SHORT)
        assert not short.suits("a", 4)
    short.ran_on_thread("a", 4, SHORT)
    assert short.suits("a", 4)


def test_endless_shapes_cost_no_more() -> None:
    short = ShortBatches()
    for number in range(3 * MAX_SIZES):
        short.ran_on_thread(number, 1, SHORT)
    assert len(short._sizes) <= MAX_SIZES


def test_a_model_is_alone_after_a_while() -> None:
    occupancy = LoopOccupancy()
    assert [occupancy.is_alone("a", 5.0 + part * ALONE_AFTER_S) for part in (0, 0.5, 1, 9)] == [False, False, True, True]
    assert not occupancy.is_alone("b", 20.0)
    assert not occupancy.is_alone("a", 20.5)
    assert occupancy.is_alone("a", 20.5 + ALONE_AFTER_S)


def test_the_occupancy_keeps_no_model_alive() -> None:
    class Someone:
        pass

    occupancy, someone = LoopOccupancy(), Someone()
    gone = weakref.ref(someone)
    occupancy.is_alone(someone, 1.0)
    del someone
    assert gone() is None


@given(turns=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, ALONE_AFTER_S / 2)), max_size=50))
def test_no_model_is_alone_soon_after_another(turns: list[tuple[str, float]]) -> None:
    occupancy, now, latest = LoopOccupancy(), 0.0, {"a": -9.0, "b": -9.0}
    for who, gap in turns:
        now += gap
        other = latest["b" if who == "a" else "a"]
        if occupancy.is_alone(who, now):
            assert now - other >= ALONE_AFTER_S
        latest[who] = now


async def test_short_batches_move_to_the_event_loop_and_are_answered_there(answers: Answers) -> None:
    backend = QuickBackend()
    model = answers.model(backend, max_rows=2)
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


async def test_answers_come_in_order_when_batches_move_to_the_event_loop(answers: Answers) -> None:
    backend = QuickBackend()
    model = answers.model(backend, max_rows=2)
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


async def test_batches_of_many_bytes_run_on_a_thread(answers: Answers) -> None:
    backend = QuickBackend()
    model = answers.model(backend, max_rows=2)
    asked = await learned_short(backend, model, answers)
    backend.threads.clear()
    for size in (LOOP_BYTES, LOOP_BYTES + 1):
        request = answers.request(asked, rows=2)
        request.size = size
        model.batcher.submit(request)
        asked += 1
        await answers.all(asked)
    assert [thread == threading.get_ident() for thread in backend.threads] == [True, False]


class Middling(QuickBackend):
    """Takes longer than a short batch may, as the processor's clock has it, and less than one that has the loop to itself."""

    def run(self, inputs: Tensors) -> Tensors:
        began = time.thread_time()
        while time.thread_time() < began + 1.5 * SHORT_S:
            pass
        return super().run(inputs)


@pytest.mark.parametrize(
    ("occupancy", "requests", "request_bytes", "on_loop"),
    [
        (False, LONE_REQUESTS, 10, True),
        (True, 1, 10, False),
        (False, LONE_REQUESTS + 1, 10, False),
        (False, 1, LONE_BYTES + 1, False),
    ],
    ids=["alone", "in occupancy", "many requests", "large requests"],
)
async def test_small_batches_of_a_lone_model_may_take_longer_on_the_loop(
    answers: Answers, occupancy: bool, requests: int, request_bytes: int, on_loop: bool
) -> None:
    backend = Middling()
    model = answers.model(backend, max_rows=16, short_s={16: 2 * SHORT_S})
    model.batcher._dispatcher.occupancy.is_alone(model.batcher._dispatcher, -ALONE_AFTER_S)
    if occupancy:
        model.batcher._dispatcher.occupancy.is_alone("another", -1.0)
    for value in range(requests):
        request = answers.request(value)
        request.size = request_bytes
        model.batcher.submit(request)
    await answers.all(requests)
    assert backend.threads == [threading.get_ident()] if on_loop else threading.get_ident() not in backend.threads


@pytest.mark.parametrize(("turn_s", "answered_at_once"), [(60.0, 30), (1e-9, 1)])
async def test_a_turn_of_the_loop_computes_for_a_bounded_time(
    answers: Answers, turn_s: float, answered_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = QuickBackend()
    model = answers.model(backend, max_rows=2)
    asked = await learned_short(backend, model, answers)
    monkeypatch.setattr(dispatcher, "TURN_S", turn_s)
    monkeypatch.setattr(dispatcher, "LONGEST_TURN_S", turn_s)
    for value in range(30):
        model.batcher.submit(answers.request(100_000 + value, rows=2))
    await asyncio.sleep(0)
    assert sum(map(len, answers.results.values())) == asked + answered_at_once
    await answers.all(asked + 30)


def test_a_model_under_watch_stays_on_its_thread() -> None:
    config = text_format.Parse('parameters { key: "halfserve.max_compute_s" value { string_value: "9" } }', ModelConfig())
    backend = QuickBackend()
    config.max_batch_size = 2
    assert not held_model(backend, config=config, max_rows=2).batcher.instances[0].may_run_on_loop
    assert held_model(backend, max_rows=2).batcher.instances[0].may_run_on_loop
    assert not held_model(HeldBackend(), max_rows=2).batcher.instances[0].may_run_on_loop, "not on the CPU"
