"""An ensemble computes its steps as their inputs come, and carries errors, deadlines and cancellations through."""

from __future__ import annotations

import asyncio
import gc
import time

import numpy as np
import pytest

from halfserve.serve.engine.ensembles.run import EnsembleRun, StepCall
from halfserve.serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    InferenceError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
)
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import RemarkedAnswer
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.engine.ensembles.scene import WAIT_S, Asked, StepBackend, add, have, model, serve
from tests.serve.engine.fakes import ByHand

BATCHED = "max_batch_size: 8"
CHAIN = ensemble(step("one", "x=x", "y=t"), step("ten", "x=t", "y=out"), more=BATCHED)
# Two steps side by side, and one that joins them.
FORK = ensemble(
    step("one", "x=x", "y=left"),
    step("ten", "x=x", "y=right"),
    step("both", "p=left q=right", "y=out"),
    more=BATCHED,
)
ONE_ROW = {"x": [[5]]}
BOTH = {"p": ("FP32", (-1, 1)), "q": ("FP32", (-1, 1))}


def both(backend: StepBackend | None = None) -> Model:
    return model("both", backend or StepBackend(lambda inputs: {"y": inputs["p"] * inputs["q"]}), inputs=BOTH)


async def entered(backend: StepBackend) -> None:
    assert await asyncio.to_thread(backend.entered.wait, WAIT_S)


async def test_a_step_gets_what_the_one_before_it_has_answered(core: InferenceCore) -> None:
    have(core, model("one"), model("ten", StepBackend(add(10))))
    pipe = serve(core, CHAIN)
    assert await Asked(core, pipe, {"x": [[5], [6]]}).value() == [[16], [17]]


async def test_tensors_are_handed_on_without_a_copy(core: InferenceCore) -> None:
    one, ten = StepBackend(lambda _: {"y": whole}), StepBackend(add(10))
    whole = np.ones((1, 1), np.float32)
    have(core, model("one", one), model("ten", ten))
    assert await Asked(core, serve(core, CHAIN), ONE_ROW).value() == [[11]]
    assert np.shares_memory(ten.batches[0]["x"], whole)


async def test_steps_that_do_not_depend_on_each_other_run_at_the_same_time(core: InferenceCore) -> None:
    one, ten = StepBackend(add(1), held=True), StepBackend(add(10), held=True)
    have(core, model("one", one), model("ten", ten), both())
    asked = Asked(core, serve(core, FORK), ONE_ROW)
    await entered(one)
    await entered(ten)
    one.release.set()
    ten.release.set()
    assert await asked.value() == [[6 * 15]]


async def test_requests_of_several_ensembles_share_the_batches_of_a_step(core: InferenceCore) -> None:
    one = StepBackend(add(1), held=True)
    have(core, model("one", one), model("ten", StepBackend(add(10))))
    pipe, other = serve(core, CHAIN), serve(core, ensemble(step("one", "x=x", "y=out"), more=BATCHED), "other")
    first = Asked(core, pipe, ONE_ROW)
    await entered(one)
    more = [Asked(core, pipe, {"x": [[6]]}), Asked(core, other, {"x": [[7]]}), Asked(core, core.model("one"), {"x": [[8]]})]
    await asyncio.sleep(0)
    one.release.set()
    assert await first.value() == [[16]]
    assert [await more[0].value(), await more[1].value(), await more[2].value("y")] == [[[17]], [[8]], [[9]]]
    assert [batch["x"].ravel().tolist() for batch in one.batches] == [[5], [6, 7, 8]]


async def test_only_what_the_wanted_outputs_need_is_computed(core: InferenceCore) -> None:
    ten = StepBackend(add(10))
    text = ensemble(step("one", "x=x", "y=a"), step("ten", "x=x", "y=b"), output="a b", more=BATCHED)
    have(core, model("one"), model("ten", ten))
    pipe = serve(core, text)
    result = await Asked(core, pipe, ONE_ROW, outputs=("a",)).result()
    assert not isinstance(result, InferenceError)
    assert {name: array.tolist() for name, array in result.items()} == {"a": [[6]]}
    assert not ten.batches
    whole = Asked(core, pipe, ONE_ROW, outputs=("b", "a"))
    assert [await whole.value("a"), await whole.value("b")] == [[[6]], [[15]]]


async def test_an_ensemble_is_a_step_of_another(core: InferenceCore) -> None:
    have(core, model("one"), model("ten", StepBackend(add(10))))
    serve(core, CHAIN, "inner")
    outer = serve(core, ensemble(step("inner", "x=x", "out=t"), step("one", "x=t", "y=out"), more=BATCHED))
    assert await Asked(core, outer, ONE_ROW).value() == [[17]]
    assert outer.is_ready
    core.replace("ten", [])
    gone = "step 2 (model 'ten'): the model is not served; load or repair it, or correct model_name"
    assert outer.fault == f"step 1 (model 'inner'): {gone}"
    assert not outer.is_ready


async def test_an_error_of_a_step_names_it_and_keeps_its_class(core: InferenceCore) -> None:
    def fail(_: Tensors) -> Tensors:
        raise ValueError("it hurts")

    have(core, model("one"), model("ten", StepBackend(fail)))
    pipe = serve(core, CHAIN)
    error = await Asked(core, pipe, ONE_ROW).error()
    assert type(error) is BackendError
    assert str(error) == "step 2 (model 'ten'): the model failed on this request: it hurts"
    assert pipe.statistics.totals.failures == {"backend": 1}


async def test_a_failing_step_drops_the_work_of_the_others(core: InferenceCore) -> None:
    def fail(_: Tensors) -> Tensors:
        raise ValueError("it hurts")

    ten, joined = StepBackend(add(10), held=True), StepBackend(lambda inputs: {"y": inputs["p"]})
    have(core, model("one", StepBackend(fail)), model("ten", ten), both(joined))
    occupying = Asked(core, core.model("ten"), ONE_ROW)
    await entered(ten)
    asked = Asked(core, serve(core, FORK), ONE_ROW)
    assert "step 1 (model 'one')" in str(await asked.error())
    assert core.model("ten").batcher.waiting == 0  # it left the queue
    ten.release.set()
    assert await occupying.value("y") == [[15]]
    assert not joined.batches
    assert len(ten.batches) == 1


async def test_a_full_queue_of_the_first_step_refuses_the_request(core: InferenceCore) -> None:
    one = StepBackend(add(1), held=True)
    have(core, model("one", one, max_waiting=2), model("ten", StepBackend(add(10))))
    pipe = serve(core, CHAIN)
    asked = [Asked(core, pipe, ONE_ROW)]
    await entered(one)
    asked += [Asked(core, pipe, ONE_ROW) for _ in range(2)]
    with pytest.raises(QueueFullError, match=r"^step 1 \(model 'one'\): .*queue") as refused:
        Asked(core, pipe, ONE_ROW)
    assert refused.value.retry_after_s > 0
    one.release.set()
    assert [await each.value() for each in asked] == [[[16]]] * 3


async def test_a_full_queue_of_a_later_step_is_the_answer(core: InferenceCore) -> None:
    ten = StepBackend(add(10), held=True)
    have(core, model("one"), model("ten", ten, max_waiting=1))
    pipe = serve(core, CHAIN)
    direct = [Asked(core, core.model("ten"), ONE_ROW)]
    await entered(ten)
    direct.append(Asked(core, core.model("ten"), ONE_ROW))
    error = await Asked(core, pipe, ONE_ROW).error()
    assert type(error) is QueueFullError
    assert str(error).startswith("step 2 (model 'ten'): ")
    assert error.retry_after_s > 0
    ten.release.set()
    assert [await each.value("y") for each in direct] == [[[15]]] * 2


async def test_a_deadline_that_passes_between_steps_ends_the_request(core: InferenceCore) -> None:
    ten = StepBackend(add(10))
    have(core, model("one"), model("ten", ten))
    core.model("one").scheduler = one = ByHand()
    end = time.monotonic() + 0.3
    asked = Asked(core, serve(core, CHAIN), ONE_ROW, deadline=end)
    while time.monotonic() <= end:
        pass
    one.submitted[0].finish({"y": np.ones((1, 1), np.float32)})
    error = await asked.error()
    assert type(error) is DeadlineExceededError
    assert str(error).startswith("step 2 (model 'ten'): ")
    assert not ten.batches


async def test_a_cancelled_request_stops_between_steps(core: InferenceCore) -> None:
    one, ten = StepBackend(add(1), held=True), StepBackend(add(10))
    have(core, model("one", one), model("ten", ten))
    pipe = serve(core, CHAIN)
    asked = Asked(core, pipe, ONE_ROW)
    await entered(one)
    asked.cancel()
    one.release.set()
    assert await Asked(core, pipe, {"x": [[7]]}).value() == [[18]]
    assert not asked.is_done
    assert len(ten.batches) == 1
    assert pipe.statistics.totals.failures == {"cancelled": 1}
    asked.cancel()  # it has ended


async def test_each_step_gets_what_the_client_has_said_about_its_request(core: InferenceCore) -> None:
    levels = "max_batch_size: 8 dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    given = {"priority": 1, "timeout": 1_000_000, "mine": "text"}
    have(core, model("one", config=levels), model("ten", config=levels))
    core.model("one").scheduler = one = ByHand()
    core.model("ten").scheduler = ten = ByHand()
    pipe, end, before = serve(core, CHAIN), time.monotonic() + 100, time.monotonic()
    asked = [Asked(core, pipe, ONE_ROW, deadline=end, parameters=given, request_id=b"7"), Asked(core, pipe, ONE_ROW)]
    for scheduler, name in ((one, "y"), (ten, "y")):
        told, plain = scheduler.submitted
        assert (told.priority, told.deadline, told.id, told.parameters) == (0, end, b"7", given)
        assert told.leave_by is not None
        assert before + 1 <= told.leave_by <= time.monotonic() + 1
        assert (plain.priority, plain.deadline, plain.leave_by, plain.parameters) == (1, None, None, {})
        assert (plain.rows, plain.bucket, plain.outputs) == (1, (1,), ("y",))
        for request in scheduler.submitted:
            request.finish({name: np.ones((1, 1), np.float32)})
    assert [await each.value() for each in asked] == [[[1]]] * 2


async def test_a_step_that_answers_another_shape_than_declared_is_named(core: InferenceCore) -> None:
    def wrong(_: Tensors) -> Tensors:
        return {"y": np.ones((1, 3), np.float32)}

    have(core, model("one", StepBackend(wrong)), model("ten"))
    error = await Asked(core, serve(core, CHAIN), ONE_ROW).error()
    assert type(error) is BackendError
    assert str(error) == "output 'y' of step 1 (model 'one') has shape [1, 3], its model declares [-1, 1]"


async def test_open_sizes_are_checked_with_each_request(core: InferenceCore) -> None:
    opened = {"y": ("FP32", (-1, -1))}
    backend = StepBackend(lambda inputs: {"y": np.ones((1, int(inputs["x"][0, 0])), np.float32)})
    have(core, model("one", backend, outputs=opened), model("ten"))
    pipe = serve(core, CHAIN)
    assert await Asked(core, pipe, {"x": [[1]]}).value() == [[2]]
    error = await Asked(core, pipe, {"x": [[3]]}).error()
    assert type(error) is InvalidArgumentError
    assert str(error) == (
        "step 2 (model 'ten'): input 'x' (the tensor 't') has shape [1, 3], expected [-1, 1] (-1 takes any size)"
    )
    lone = serve(core, ensemble(step("one", "x=x", "y=out"), more=BATCHED), "lone")
    error = await Asked(core, lone, {"x": [[3]]}).error()
    assert str(error) == (
        "output 'y' of step 1 (model 'one'), which is the output 'out' of the ensemble, has shape [1, 3], expected [-1, 1] "
        "(-1 takes any size)"
    )


async def test_an_answer_without_a_declared_output_is_an_error_and_not_a_hang(
    core: InferenceCore, caplog: pytest.LogCaptureFixture
) -> None:
    have(core, model("one", StepBackend(lambda inputs: {"z": inputs["x"]})), model("ten"))
    error = await Asked(core, serve(core, CHAIN), ONE_ROW).error()
    assert str(error) == "a step answered what its model does not declare: KeyError"
    await core.drain()
    assert "KeyError" in caplog.text


async def test_a_model_without_a_batch_dimension_takes_one_row(core: InferenceCore) -> None:
    lone = model("ten", StepBackend(add(10)), inputs={"x": ("FP32", (1,))}, outputs={"y": ("FP32", (1,))}, config="")
    have(core, model("one"), lone)
    pipe = serve(core, CHAIN)
    assert await Asked(core, pipe, ONE_ROW).value() == [[16]]
    error = await Asked(core, pipe, {"x": [[5], [6]]}).error()
    assert type(error) is InvalidArgumentError
    assert str(error) == (
        "step 2 (model 'ten'): the model has no batch dimension, so it takes one row, but the tensor 't' has 2; send one "
        "row a request"
    )


async def test_a_model_with_a_batch_dimension_takes_a_tensor_without_one_as_a_row(core: InferenceCore) -> None:
    lone = model("one", inputs={"x": ("FP32", (1,))}, outputs={"y": ("FP32", (1,))}, config="")
    have(core, lone, model("ten", StepBackend(add(10))))
    pipe = serve(core, CHAIN.replace(BATCHED, ""))
    assert await Asked(core, pipe, {"x": [5]}).value() == [16]


async def test_response_parameters_of_a_step_are_the_ensembles(core: InferenceCore) -> None:
    have(core, model("one"), model("ten", StepBackend(add(10))))
    core.model("one").scheduler = one = ByHand()
    asked = Asked(core, serve(core, CHAIN), ONE_ROW)
    one.submitted[0].finish(RemarkedAnswer({"y": np.ones((1, 1), np.float32)}, {"halfserve.precision": "fp32"}))
    result = await asked.result()
    assert isinstance(result, RemarkedAnswer)
    assert result.parameters == {"halfserve.precision": "fp32"}
    assert result["out"].tolist() == [[11]]


@pytest.mark.parametrize("key", [7, "seven"])
async def test_the_response_to_a_request_of_a_sequence_names_its_place(core: InferenceCore, key: int | str) -> None:
    have(core, model("one"), model("ten", StepBackend(add(10))))
    pipe, flags = serve(core, CHAIN), ("sequence_start", "sequence_end")
    for start, end in ((True, False), (False, False), (False, True)):
        given = {"sequence_id": key, **{name: True for name, is_set in zip(flags, (start, end), strict=True) if is_set}}
        answer = await Asked(core, pipe, ONE_ROW, parameters=given).result()
        assert isinstance(answer, RemarkedAnswer)
        assert answer["out"].tolist() == [[16]]
        assert answer.parameters == {"sequence_id": key, "sequence_start": start, "sequence_end": end}
    assert not isinstance(await Asked(core, pipe, ONE_ROW, parameters={"priority": 1}).result(), RemarkedAnswer)


async def test_an_unloaded_step_finishes_the_requests_that_need_it(core: InferenceCore) -> None:
    one, ten = StepBackend(add(1), held=True), StepBackend(add(10))
    have(core, model("one", one), model("ten", ten))
    pipe = serve(core, CHAIN)
    asked = Asked(core, pipe, ONE_ROW)
    await entered(one)
    (leaving,) = core.replace("ten", [])
    gone = "step 2 (model 'ten'): the model is not served; load or repair it, or correct model_name"
    with pytest.raises(UnavailableError) as refused:
        Asked(core, pipe, ONE_ROW)
    assert str(refused.value) == f"the ensemble cannot be computed now: {gone}"
    assert [(s.state, s.reason) for s in core.index() if s.name == "pipe"] == [("UNAVAILABLE", gone)]
    assert not core.is_model_ready("pipe")
    assert not leaving.done()
    one.release.set()
    assert await asked.value() == [[16]]
    await asyncio.wait_for(leaving, WAIT_S)
    core.replace("ten", [model("ten", StepBackend(add(20)))])
    assert core.is_model_ready("pipe")
    assert await Asked(core, pipe, ONE_ROW).value() == [[26]]


async def test_a_reloaded_step_that_fits_no_more_is_named_until_it_fits_again(core: InferenceCore) -> None:
    have(core, model("one"), model("ten"))
    pipe = serve(core, CHAIN)
    wide = {"x": ("FP32", (-1, 4))}
    core.replace("ten", [model("ten", inputs=wide)])
    assert pipe.fault == (
        "step 2 (model 'ten'): input 'x' has shape [-1, 4], but the tensor 't' has shape [-1, 1], as output 'y' of step 1 "
        "(model 'one')"
    )
    with pytest.raises(UnavailableError, match="the ensemble cannot be computed now: step 2"):
        Asked(core, pipe, ONE_ROW)
    core.replace("ten", [model("ten", StepBackend(add(10)))])
    assert pipe.fault == ""
    assert await Asked(core, pipe, ONE_ROW).value() == [[16]]


async def test_an_unloaded_ensemble_lets_go_of_its_models(core: InferenceCore) -> None:
    have(core, model("one"), model("ten"))
    serve(core, CHAIN)
    assert core.model("one").holders
    (leaving,) = core.replace("pipe", [])
    await asyncio.wait_for(leaving, WAIT_S)
    assert not core.model("one").holders
    (leaving,) = core.replace("one", [])
    await asyncio.wait_for(leaving, WAIT_S)


async def test_stages_of_the_whole_are_those_of_its_longest_way(core: InferenceCore) -> None:
    have(core, model("one"), model("ten", StepBackend(add(10))), both())
    pipe = serve(core, FORK)
    for _ in range(3):
        await Asked(core, pipe, {"x": [[5], [6]]}).value()
    totals = pipe.statistics.totals
    assert (totals.success.count, totals.rows, totals.batches) == (3, 6, 3)
    stages = (totals.queue, totals.compute_input, totals.compute_infer, totals.compute_output)
    assert sum(stage.ns for stage in stages) == totals.success.ns
    steps = [core.model(name).statistics.totals for name in ("one", "ten", "both")]
    assert 0 < totals.compute_infer.ns <= sum(step.compute_infer.ns for step in steps)


def test_ended_requests_are_freed_by_reference_counting() -> None:
    """Answered, failed and cancelled ones: in a server the garbage collector runs rarely."""

    def living() -> int:
        return sum(type(found) in {EnsembleRun, StepCall} for found in gc.get_objects())

    async def scene() -> None:
        core = InferenceCore([model("one"), model("ten")])
        # By hand: a worker thread lets go of its last batch when it likes.
        core.model("one").scheduler = one = ByHand()
        core.model("ten").scheduler = ten = ByHand()
        answer = {"y": np.ones((1, 1), np.float32)}
        pipe = serve(core, CHAIN)
        answered, failed, cancelled = (Asked(core, pipe, ONE_ROW) for _ in range(3))
        for request in one.submitted[:2]:
            request.finish(answer)
        ten.submitted[0].finish(answer)
        ten.submitted[1].finish(BackendError("it hurts"))
        cancelled.cancel()
        assert await answered.value() == [[1]]
        assert str(await failed.error()) == "step 2 (model 'ten'): it hurts"
        for hand in (one, ten):
            hand.submitted.clear()
            hand.cancelled.clear()
        await core.drain()

    gc.collect()  # what other tests have left
    before = living()
    gc.disable()
    try:
        asyncio.run(scene())
        assert living() <= before
    finally:
        gc.enable()
