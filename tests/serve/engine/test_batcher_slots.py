"""Models that share the server's compute slots."""

from __future__ import annotations

import asyncio

from serve.engine.errors import InferenceError
from serve.engine.inference_core import InferenceCore
from serve.engine.queueing.compute_slots import ComputeSlots
from serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.scene import Answers, QuickBackend, hold_first, run


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
