"""Each response of a decoupled step goes through the rest of its ensemble."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from halfserve.serve.engine.errors import BackendError, InferenceError, UnmetStepsError, UnsupportedError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.engine.ensembles.scene import WAIT_S, Asked, StepBackend, add, have, model, serve
from tests.serve.engine.fakes import ByHand

DECOUPLED = "max_batch_size: 8 model_transaction_policy { decoupled: true }"
BATCHED = "max_batch_size: 8"
MANY_THEN_TEN = ensemble(step("many", "x=x", "y=t"), step("ten", "x=t", "y=out"), more=BATCHED)
WIDE = ("FP32", (-1, -1))
Told = list[tuple[Any, bool]]


def many(name: str = "many") -> tuple[Model, ByHand]:
    """A decoupled model whose responses the test gives."""
    return by_hand(name, DECOUPLED)


def by_hand(name: str, config: str = BATCHED) -> tuple[Model, ByHand]:
    """A model whose answers the test gives; its tensors are of any width."""
    made = model(name, inputs={"x": WIDE}, outputs={"y": WIDE}, config=config)
    made.scheduler = hand = ByHand()
    return made, hand


def ten() -> Model:
    return model("ten", StepBackend(add(10)))


def value(number: float) -> Tensors:
    return {"y": np.full((1, 1), number, np.float32)}


def respond(request: InferRequest, numbers: Sequence[float], *, final: bool = False, read: list[float] | None = None) -> None:
    """Give responses; with `final` the last one says that it is the last. `read` gets the number of each that was read."""
    assert request.respond is not None
    for at, number in enumerate(numbers):
        request.respond(value(number), final and at == len(numbers) - 1, partial(([] if read is None else read).append, number))
    if final:
        request.finish({})


class AskedMany(Asked):
    """A request that takes any number of responses."""

    def __init__(self, core: InferenceCore, served: Model, x: float) -> None:
        self.told: list[tuple[Tensors | InferenceError, bool]] = []
        self.reads: list[Callable[[], None]] = []
        super().__init__(core, served, {"x": [[x]]}, respond=self._respond)

    def _respond(self, result: Tensors | InferenceError, final: bool, read: Callable[[], None]) -> None:
        self.told.append((result, final))
        self.reads.append(read)

    async def all(self, name: str = "out") -> Told:
        """The responses, once no further one comes, each with whether it said that it is the last."""
        result = await self.result()
        assert not isinstance(result, InferenceError), result
        assert not result
        return [(outputs[name].item(), final) for outputs, final in self.told if not isinstance(outputs, InferenceError)]


async def test_each_response_of_a_step_goes_through_the_steps_behind_it(core: InferenceCore) -> None:
    served, hand = many()
    have(core, served, ten())
    pipe = serve(core, MANY_THEN_TEN)
    assert pipe.is_decoupled
    assert pipe.config.model_transaction_policy.decoupled
    asked = AskedMany(core, pipe, 5)
    respond(hand.submitted[0], (1, 2))
    respond(hand.submitted[0], (3,), final=True)
    assert await asked.all() == [(11, False), (12, False), (13, True)]
    totals = pipe.statistics.totals
    assert (totals.success.count, totals.batches, totals.fail.count) == (1, 1, 0)


async def test_a_final_flag_of_its_own_ends_the_ensemble_after_its_last_step(core: InferenceCore) -> None:
    served, hand = many()
    last, behind = by_hand("ten")
    have(core, served, last)
    pipe = serve(core, MANY_THEN_TEN)
    asked, none = AskedMany(core, pipe, 5), AskedMany(core, pipe, 5)
    respond(hand.submitted[0], (1, 2))
    behind.submitted[0].finish(value(1))
    hand.submitted[0].finish({})
    assert not asked.is_done
    behind.submitted[1].finish(value(2))
    assert await asked.all() == [(1, False), (2, True)]
    hand.submitted[1].finish({})
    assert await none.all() == []


LIMITED = ensemble(step("many", "x=x", "y=t"), step("ten", "x=t", "y=out"), "max_inflight_requests: 2", more=BATCHED)


async def test_max_inflight_requests_bounds_a_step_over_all_requests(core: InferenceCore) -> None:
    served, hand = many()
    last, behind = by_hand("ten")

    def sent() -> list[float]:
        return [request.inputs["x"].item() for request in behind.submitted]

    have(core, served, last)
    pipe = serve(core, LIMITED)
    first, left, second = (AskedMany(core, pipe, x) for x in (1, 2, 3))
    respond(hand.submitted[0], (1, 2, 3))
    respond(hand.submitted[1], (10,))
    assert sent() == [1, 2]
    behind.submitted[0].finish(value(11))
    assert sent() == [1, 2, 3]
    assert len(hand.submitted) == 2, "the third request waits for the limit of the first step"
    left.cancel()
    assert len(hand.submitted) == 3
    behind.submitted[1].finish(BackendError("broken"))
    assert sent() == [1, 2, 3], "what waits is the cancelled request's"
    respond(hand.submitted[2], (4, 5, 6), final=True)
    assert sent() == [1, 2, 3, 4, 5]
    behind.submitted[4].finish(value(15))
    assert sent() == [1, 2, 3, 4, 5, 6]
    for at in (3, 5):
        behind.submitted[at].finish(value(at))
    assert await second.all() == [(15, False), (3, False), (5, True)]
    assert isinstance(await first.result(), BackendError)


async def test_the_last_response_is_not_final_while_a_step_may_give_more(core: InferenceCore) -> None:
    served, hand = many()
    have(core, served)
    asked = AskedMany(core, serve(core, ensemble(step("many", "x=x", "y=out"), more=BATCHED)), 5)
    respond(hand.submitted[0], (1,))
    assert not asked.is_done
    hand.submitted[0].finish({})
    assert await asked.all() == [(1, False)]


async def test_responses_of_two_decoupled_steps_multiply(core: InferenceCore) -> None:
    (first, hand), (second, behind) = many(), many("more")
    text = ensemble(step("many", "x=x", "y=t"), step("more", "x=t", "y=u"), step("ten", "x=u", "y=out"), more=BATCHED)
    have(core, first, second, ten())
    asked = AskedMany(core, serve(core, text), 5)
    respond(hand.submitted[0], (1, 2), final=True)
    for at in (0, 1):
        assert behind.submitted[at].inputs["x"].item() == at + 1
        respond(behind.submitted[at], (3 * at, 3 * at + 1), final=True)
    assert await asked.all() == [(10, False), (11, False), (13, False), (14, True)]


async def test_a_step_goes_on_once_all_that_came_of_its_response_was_read(core: InferenceCore) -> None:
    """By the client, or by the decoupled step that follows."""
    (first, hand), (second, behind) = many(), many("more")
    text = ensemble(step("many", "x=x", "y=t"), step("more", "x=t", "y=u"), step("ten", "x=u", "y=out"), more=BATCHED)
    have(core, first, second, ten())
    asked = AskedMany(core, serve(core, text), 5)
    read: list[float] = []
    respond(hand.submitted[0], (1, 2), read=read)
    respond(behind.submitted[0], (3, 4), read=read)
    assert not read
    behind.submitted[0].finish({})
    assert read == [1]
    respond(behind.submitted[1], (5,), final=True, read=read)
    assert read == [1, 2]
    hand.submitted[0].finish({})
    assert len(await asked.all()) == 3
    for then in asked.reads:
        then()
    assert read == [1, 2, 3, 4, 5]


async def test_a_nested_ensemble_hands_on_each_response(core: InferenceCore) -> None:
    served, hand = many()
    have(core, served, ten())
    serve(core, MANY_THEN_TEN, "inner")
    outer = serve(core, ensemble(step("inner", "x=x", "out=t"), step("ten", "x=t", "y=out"), more=BATCHED))
    asked = AskedMany(core, outer, 5)
    respond(hand.submitted[0], (1, 2), final=True)
    assert await asked.all() == [(21, False), (22, True)]


async def test_steps_side_by_side_join_the_same_response(core: InferenceCore) -> None:
    """As in Triton's fan_repeat: a response goes to one step directly and through another one."""
    served, hand = many()
    one = ("FP32", (-1, 1))
    both = model("both", StepBackend(lambda inputs: {"y": inputs["p"] - inputs["q"]}), inputs={"p": one, "q": one})
    text = ensemble(step("many", "x=x", "y=t"), step("ten", "x=t", "y=u"), step("both", "p=u q=t", "y=out"), more=BATCHED)
    have(core, served, ten(), both)
    asked = AskedMany(core, serve(core, text), 5)
    respond(hand.submitted[0], (1, 2, 3), final=True)
    assert await asked.all() == [(10, False), (10, False), (10, True)]


@pytest.mark.parametrize("label", ["step 1 (model 'many')", "step 2 (model 'ten')"])
async def test_the_error_of_one_response_ends_the_request_and_drops_the_others(core: InferenceCore, label: str) -> None:
    served, hand = many()
    last, behind = by_hand("ten")
    have(core, served, last)
    pipe = serve(core, MANY_THEN_TEN)
    asked = AskedMany(core, pipe, 5)
    respond(hand.submitted[0], (1, 2, 3))
    behind.submitted[0].finish(value(1))
    if "ten" in label:
        behind.submitted[1].finish(BackendError("it hurts"))
    else:
        assert hand.submitted[0].respond is not None
        hand.submitted[0].respond(BackendError("it hurts"), False, lambda: None)
    assert str(await asked.error()) == f"{label}: it hurts"
    assert [final for _, final in asked.told] == [False]
    assert hand.submitted[0].cancelled
    assert behind.submitted[2].cancelled
    totals = pipe.statistics.totals
    assert (totals.success.count, totals.fail.count) == (0, 1)


async def test_a_cancelled_request_drops_the_steps_of_every_response(core: InferenceCore) -> None:
    served, hand = many()
    last, behind = by_hand("ten")
    have(core, served, last)
    pipe = serve(core, MANY_THEN_TEN)
    asked = AskedMany(core, pipe, 5)
    respond(hand.submitted[0], (1, 2))
    asked.cancel()
    assert [request.cancelled for request in (*hand.submitted, *behind.submitted)] == [True] * 3
    respond(hand.submitted[0], (3,))
    assert len(behind.submitted) == 2
    assert pipe.statistics.totals.failures == {"cancelled": 1}


async def test_a_draining_ensemble_gives_every_response_first(core: InferenceCore) -> None:
    served, hand = many()
    have(core, served, ten())
    pipe = serve(core, MANY_THEN_TEN)
    asked = AskedMany(core, pipe, 5)
    respond(hand.submitted[0], (1,))
    draining = asyncio.create_task(pipe.scheduler.drain())
    await asyncio.sleep(0)
    respond(hand.submitted[0], (2,), final=True)
    assert await asked.all() == [(11, False), (12, True)]
    await asyncio.wait_for(draining, WAIT_S)


async def test_memory_of_answered_responses_is_free_again(core: InferenceCore) -> None:
    served, hand = many()
    last, behind = by_hand("ten")
    have(core, served, last)
    asked = AskedMany(core, serve(core, MANY_THEN_TEN), 5)
    large = {"y": np.ones((1, 1 << 16), np.float32)}
    for _ in range(100):
        assert hand.submitted[0].respond is not None
        hand.submitted[0].respond(large, False, lambda: None)
        behind.submitted.pop().finish(value(1))
    assert 0 < core.step_memory.claimed <= 2 * large["y"].nbytes
    hand.submitted[0].finish({})
    assert len(await asked.all()) == 100
    assert not core.step_memory.claimed


async def test_a_request_for_one_response_is_refused(core: InferenceCore) -> None:
    served, hand = many()
    have(core, served, ten())
    with pytest.raises(UnsupportedError, match=r"model 'pipe' is decoupled: .* send it by ModelStreamInfer"):
        Asked(core, serve(core, MANY_THEN_TEN), {"x": [[5]]})
    assert not hand.submitted


async def test_a_response_cache_is_refused_with_a_decoupled_step(core: InferenceCore) -> None:
    served, _ = many()
    have(core, served, ten())
    with pytest.raises(UnmetStepsError, match="response_cache is for models with one answer .* but a step is decoupled"):
        serve(core, MANY_THEN_TEN + " response_cache { enable: true }")


async def test_an_ensemble_is_decoupled_as_long_as_a_step_is(core: InferenceCore) -> None:
    served, _ = many()
    have(core, served, ten())
    pipe = serve(core, MANY_THEN_TEN)
    core.replace("many", [model("many")])
    assert not pipe.is_decoupled
    assert not pipe.config.model_transaction_policy.decoupled
    assert await Asked(core, pipe, {"x": [[5]]}).value() == [[16]]
