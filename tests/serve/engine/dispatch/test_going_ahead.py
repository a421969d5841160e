"""Instances take their next batch while they compute, within their share of the compute slots."""

from __future__ import annotations

import asyncio
import math
import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.engine.dispatch.dispatcher import AHEAD_S
from halfserve.serve.engine.dispatch.short_batches import SHORT_S
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, QuickBackend, hold_first

MIDDLING_S = (SHORT_S + AHEAD_S) / 2


def ahead_model(answers: Answers, backend: HeldBackend, latest_s: float = MIDDLING_S, max_rows: int = 2) -> Model:
    """Of batches of `max_rows` at most, the latest of which has taken `latest_s`."""
    model = answers.model(backend, max_rows=max_rows)
    model.batcher._free.latest_s = latest_s
    return model


async def turns() -> None:
    """All that the batcher does without being told more."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_full_batch_does_not_wait_for_the_end_of_the_one_before(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = ahead_model(answers, backend)
    (instance,) = model.batcher.instances
    await hold_first(backend, model.batcher, answers)
    model.batcher.submit(answers.request(1))
    await turns()
    assert (instance.batches, model.batcher.waiting) == (1, 1), "another request may come and make it larger"
    answers.submit(model, 2, 3, 4, 5)
    await turns()
    assert (instance.batches, model.batcher.waiting) == (2, 3), "one batch ahead, and no more"
    assert len(instance.next_requests) == 2
    backend.release.set()
    await answers.all(6)
    assert backend.batches == [[100], [1, 2], [3, 4], [5]]
    assert [answers.value(value) for value in range(1, 6)] == [2, 3, 4, 5, 6]
    assert (instance.batches, model.statistics.totals.batches) == (0, 4)


@pytest.mark.parametrize("latest_s", [SHORT_S, AHEAD_S * 1.01, math.inf], ids=["short", "long", "unknown"])
async def test_only_batches_of_middling_length_go_ahead(answers: Answers, latest_s: float) -> None:
    backend = HeldBackend(held=True)
    model = ahead_model(answers, backend, latest_s)
    await hold_first(backend, model.batcher, answers)
    answers.submit(model, 1, 2, 3)
    await turns()
    assert model.batcher.waiting == 3
    backend.release.set()
    await answers.all(4)


@pytest.mark.parametrize(
    ("copies", "size", "open_ended", "goes_ahead"),
    [(2, 1, False, True), (2, -1, False, False), (2, 1, True, False), (1, -1, True, True)],
    ids=["all alike", "of any shape", "of any length", "one copy"],
)
async def test_no_batch_waits_for_a_long_one_that_another_copy_could_compute(
    answers: Answers, copies: int, size: int, open_ended: bool, goes_ahead: bool
) -> None:
    held = [HeldBackend(held=True) for _ in range(copies)]
    model = answers.model(held[0], max_rows=2, others=held[1:], size=size, open_ended=open_ended)
    model.batcher._free.latest_s = MIDDLING_S
    for number, backend in enumerate(reversed(held)):
        model.batcher.submit(answers.request(100 + number))
        assert await asyncio.to_thread(backend.entered.wait, 20)
    answers.submit(model, 1, 2)
    await turns()
    assert model.batcher.waiting == (0 if goes_ahead else 2)
    for backend in held:
        backend.release.set()
    await answers.all(copies + 2)


@pytest.mark.parametrize("in_time", [[], [2]], ids=["all", "some"])
async def test_requests_late_behind_a_long_batch_are_not_computed(answers: Answers, in_time: list[float]) -> None:
    backend = HeldBackend(held=True)
    model = ahead_model(answers, backend, max_rows=3)
    await hold_first(backend, model.batcher, answers)
    requests = [answers.request(1), answers.request(2), answers.request(3)]
    for request in requests:
        model.batcher.submit(request)
    await turns()
    assert model.batcher.waiting == 0
    requests[0].leave_by = requests[2].deadline = time.monotonic()  # as when the first batch has taken longer than usual
    requests[1].leave_by = None if in_time else time.monotonic()
    backend.release.set()
    await answers.all(4)
    assert backend.batches == ([[100], in_time] if in_time else [[100]])
    assert "longer than its timeout allows; it was not computed" in str(answers.error(1))
    assert "the deadline passed while the request waited in the queue; it was not computed" in str(answers.error(3))
    totals = model.statistics.totals
    answered = 1 + len(in_time)
    assert (totals.success.count, totals.rows, totals.failures) == (answered, answered, {"deadline_exceeded": 4 - answered})


async def test_requests_late_behind_a_long_batch_are_answered_before_its_end(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = ahead_model(answers, backend)
    await hold_first(backend, model.batcher, answers)
    model.batcher.submit(answers.request(1, leave_by=time.monotonic() + 0.1))
    model.batcher.submit(answers.request(2))
    await turns()
    assert model.batcher.waiting == 0
    await answers.all(1)
    assert "longer than its timeout allows; it was not computed" in str(answers.error(1))
    assert not backend.batches
    backend.release.set()
    await answers.all(3)
    assert backend.batches == [[100], [2]]
    totals = model.statistics.totals
    assert (totals.success.count, totals.failures) == (2, {"deadline_exceeded": 1})


async def test_models_that_share_slots_keep_to_their_turns(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = ahead_model(answers, backend)
    model.batcher.compete(ComputeSlots(1))
    await hold_first(backend, model.batcher, answers)
    answers.submit(model, 1, 2)
    await turns()
    assert model.batcher.waiting == 2
    backend.release.set()
    await answers.all(3)


async def test_a_failing_batch_ahead_fails_alone(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = ahead_model(answers, backend)
    await hold_first(backend, model.batcher, answers)
    answers.submit(model, -1, 2, 3)
    await turns()
    backend.release.set()
    await answers.all(4)
    assert "negative values hurt" in str(answers.error(-1))
    assert [answers.value(value) for value in (2, 3, 100)] == [3, 4, 101]


@settings(max_examples=30, deadline=None)
@given(groups=st.lists(st.integers(1, 7), min_size=1, max_size=12), max_rows=st.integers(1, 4))
def test_every_request_gets_its_own_answer_once_and_in_order(groups: list[int], max_rows: int) -> None:
    async def main() -> None:
        answers, backend = Answers(), HeldBackend()
        model = ahead_model(answers, backend, max_rows=max_rows)
        for number, group in enumerate(groups):
            for value in range(group):
                model.batcher.submit(answers.request(10 * number + value))
            await turns()
            model.batcher._free.latest_s = MIDDLING_S  # these batches are short
        await answers.all(sum(groups))
        values = [10 * number + value for number, group in enumerate(groups) for value in range(group)]
        assert [answers.value(value) for value in values] == [value + 1 for value in values]
        assert list(chain.from_iterable(backend.batches)) == values
        await model.batcher.drain()

    asyncio.run(main())


async def test_models_that_share_a_slot_take_turns(answers: Answers) -> None:
    slots = ComputeSlots(1)
    first, second = HeldBackend(held=True), HeldBackend()
    flood, guest = held_model(first, "flood", max_rows=1), held_model(second, "guest", max_rows=1)
    for model in (flood, guest):
        model.batcher.compete(slots)
    await hold_first(first, flood.batcher, answers)
    answers.submit(flood, *range(10))
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


async def test_a_cancelled_request_gives_its_turn_to_the_other_model(answers: Answers) -> None:
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


async def test_models_on_the_cpu_compete_for_the_slots_of_the_server(answers: Answers) -> None:
    core = InferenceCore([])
    core.slots = ComputeSlots(1)
    on_cpu, elsewhere = held_model(QuickBackend(), "cpu"), held_model(HeldBackend(), "device")
    core.replace("cpu", [on_cpu])
    core.replace("device", [elsewhere])
    core.replace("cpu", [on_cpu])
    assert (on_cpu.batcher._dispatcher.share is None, elsewhere.batcher._dispatcher.share is None) == (False, True)
    for value, model in enumerate([on_cpu, elsewhere] * 20):
        core.submit(model, answers.request(value))
    await answers.all(40)
    await core.drain()
    assert core.slots.free == 1
