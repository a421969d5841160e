"""Tensors between the steps of ensembles are bounded, and count in the server's memory budget."""

from __future__ import annotations

import time

import numpy as np

from halfserve.serve.engine.errors import DeadlineExceededError, InferenceError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import CallingExecution, InferRequest
from halfserve.serve.security.memory_budget import MemoryBudget
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.engine.ensembles.scene import Asked, have, model, serve
from tests.serve.engine.fakes import ByHand

BATCHED = "max_batch_size: 8"
CHAIN = ensemble(step("one", "x=x", "y=t"), step("ten", "x=t", "y=out"), more=BATCHED)
COLUMNS = 2**18
ROW_BYTES = 4 * COLUMNS  # between the steps
WIDE = ("FP32", (-1, COLUMNS))


def bounded(core: InferenceCore, limit_rows: int = 10) -> tuple[ByHand, ByHand]:
    """The schedulers of the two steps, with so many rows between them."""
    core.step_memory.bound(limit_rows * ROW_BYTES, MemoryBudget(2**30).share(is_known=True))
    one, ten = ByHand(), ByHand()
    core.model("one").scheduler, core.model("ten").scheduler = one, ten
    return one, ten


def models() -> tuple[Model, Model]:
    return model("one", outputs={"y": WIDE}), model("ten", inputs={"x": WIDE})


def rows(count: int) -> dict[str, list[list[int]]]:
    return {"x": [[5]] * count}


def answer(step_of: ByHand) -> None:
    """Answer the first waiting request of a step with as many rows as it has."""
    request = step_of.submitted.pop(0)
    columns = COLUMNS if request.inputs["x"].shape[1] == 1 else 1
    request.finish({"y": np.broadcast_to(np.float32(1), (request.rows, columns))})


async def test_requests_wait_before_their_first_step_for_memory(core: InferenceCore) -> None:
    have(core, *models())
    one, ten = bounded(core)
    pipe = serve(core, CHAIN)
    asked = [Asked(core, pipe, rows(1)) for _ in range(30)]
    most = 0
    while one.submitted or ten.submitted:
        while one.submitted:
            answer(one)
        most = max(most, len(ten.submitted))
        answer(ten)
    assert 8 <= most <= 10
    assert [await each.value() for each in asked] == [[[1]]] * 30


async def test_a_request_larger_than_the_bound_is_computed_alone(core: InferenceCore) -> None:
    have(core, *models())
    one, ten = bounded(core, limit_rows=4)
    pipe = serve(core, CHAIN)
    asked = [Asked(core, pipe, rows(8))]
    answer(one)
    asked += [Asked(core, pipe, rows(1)) for _ in range(2)]
    assert not one.submitted
    answer(ten)
    for each in (one, ten) * 2:
        answer(each)
    assert [len(await each.value()) for each in asked] == [8, 1, 1]


async def test_tensors_far_larger_than_expected_are_refused_with_a_hint(core: InferenceCore) -> None:
    have(core, *models())
    one, ten = bounded(core)
    pipe = serve(core, CHAIN)
    first = Asked(core, pipe, rows(1))
    answer(one)
    answer(ten)
    asked = [Asked(core, pipe, rows(4)) for _ in range(10)]
    while one.submitted:
        answer(one)
        assert core.step_memory.claimed <= 15 * ROW_BYTES
    while ten.submitted:
        answer(ten)
    results = [await each.result() for each in (first, *asked)]
    refused = [result for result in results if isinstance(result, InferenceError)]
    assert 0 < len(refused) < 10
    for error in refused:
        assert isinstance(error, UnavailableError)
        assert "between the steps of ensembles" in str(error)
        assert error.retry_after_s
    assert core.step_memory.claimed == 0


async def test_an_ensemble_within_an_ensemble_does_not_wait_for_what_the_outer_one_holds(core: InferenceCore) -> None:
    have(core, *models())
    one, ten = bounded(core, limit_rows=1)
    serve(core, CHAIN)
    steps = step("one", "x=x", "y=t"), step("ten", "x=t", "y=u"), step("pipe", "x=u", "out=out")
    asked = Asked(core, serve(core, ensemble(*steps, more=BATCHED), "outer"), rows(8))
    for each in (one, ten) * 2:
        answer(each)
    assert len(await asked.value()) == 8


async def test_a_call_of_a_model_does_not_wait_for_what_its_callers_hold(core: InferenceCore) -> None:
    have(core, *models())
    one, ten = bounded(core, limit_rows=1)
    pipe = serve(core, CHAIN)
    asked = Asked(core, pipe, rows(8))
    answer(one)
    results: list[object] = []
    call = InferRequest({"x": np.ones((1, 1), np.float32)}, ("out",), 1, (1,), None, results.append)
    call.callers = (CallingExecution("python/1"),)
    core.submit(pipe, call)
    answer(one)
    for _ in range(2):
        answer(ten)
    assert (len(await asked.value()), len(results)) == (8, 1)


async def test_cancelled_and_late_requests_that_wait_for_memory_are_not_computed(core: InferenceCore) -> None:
    have(core, *models())
    one, ten = bounded(core)
    pipe = serve(core, CHAIN)
    asked = Asked(core, pipe, rows(8))
    answer(one)
    end = time.monotonic() + 0.1
    cancelled, late, last = Asked(core, pipe, rows(8)), Asked(core, pipe, rows(8), deadline=end), Asked(core, pipe, rows(8))
    cancelled.cancel()
    assert type(await late.error()) is DeadlineExceededError
    assert not one.submitted
    answer(ten)
    assert len(one.submitted) == 1
    answer(one)
    answer(ten)
    assert (len(await asked.value()), len(await last.value())) == (8, 8)
    assert not cancelled.is_done
    assert pipe.statistics.totals.failures == {"cancelled": 1, "deadline_exceeded": 1}


async def test_tensors_between_the_steps_count_in_the_memory_budget(core: InferenceCore) -> None:
    have(core, *models())
    one, ten = bounded(core)
    budget = MemoryBudget(2**26)
    core.step_memory.bound(2**25, budget.share(is_known=True))
    asked = Asked(core, serve(core, CHAIN), rows(1))
    answer(one)
    assert budget.held_bytes == ROW_BYTES
    answer(ten)
    assert await asked.value() == [[1]]
    assert budget.held_bytes == 0
