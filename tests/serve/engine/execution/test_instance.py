"""One copy of a model on its thread: faults, time limits, reloads."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.dispatch.refusals import LOADING_S
from halfserve.serve.engine.errors import InferenceError, ModelLoadError, UnavailableError
from halfserve.serve.engine.execution.instance import LOOKS
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.fragile_copies import DOWN, WAIT_S, Copies, Fragile, Scene, Slow

LIMIT_S = 0.5  # also for the batches of the copy that comes up then


async def test_a_batch_that_hangs_is_given_up_and_the_copy_reloaded(copies: Copies) -> None:
    stuck, fresh = HeldBackend(held=True), HeldBackend()
    scene = copies([stuck], lambda: fresh, max_compute_s=LIMIT_S)
    assert await scene.ask(1, 2) == ["the model did not answer within its 0.5 s and is being restarted; try again later"] * 2
    await scene.up_again()
    # What the stuck thread still finds out is of no interest any more.
    stuck.release.set()
    assert await scene.ask(3) == [4]
    assert (stuck.batches in ([], [[1, 2]]), fresh.batches) == (True, [[3]])
    assert scene.statistics.totals.fail.count == 2


async def test_a_copy_that_hangs_comes_back_once_a_thread_can_be_started(
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = iter(["refused", "refused"])

    class Scarce(Worker):
        def __init__(self, name: str) -> None:
            if next(starts, None) is not None:
                raise RuntimeError("can't start new thread")
            super().__init__(name)

    stuck, fresh = HeldBackend(held=True), HeldBackend()
    scene = copies([stuck], lambda: fresh, max_compute_s=LIMIT_S)
    monkeypatch.setattr("halfserve.serve.engine.execution.recovery.Worker", Scarce)
    assert await scene.ask(1) == ["the model did not answer within its 0.5 s and is being restarted; try again later"]
    await scene.up_again()
    assert scene.instances[0].fault == "can't start new thread"
    assert await scene.ask(3) == [4]
    assert (next(starts, None), fresh.batches) == (None, [[3]])
    stuck.release.set()


async def _one_behind(scene: Scene, entered: threading.Event) -> list[asyncio.Future[Tensors | InferenceError]]:
    """A request that is being computed, and a full batch that its copy has taken meanwhile."""
    first = scene.submit(0)
    assert await asyncio.to_thread(entered.wait, WAIT_S)
    scene.batcher._free.latest_s = 0.001
    behind = [scene.submit(value) for value in range(1, 9)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert scene.instances[0].batches == 2
    return [first, *behind]


async def test_the_batch_behind_one_that_hangs_is_computed_by_the_next_copy() -> None:
    stuck, fresh = HeldBackend(held=True), HeldBackend()
    scene = Scene([stuck], lambda: fresh, max_compute_s=LIMIT_S)
    first, *behind = await asyncio.gather(*await _one_behind(scene, stuck.entered))
    assert isinstance(first, InferenceError)
    assert "did not answer" in str(first)
    assert [result["y"][0, 0] for result in behind if not isinstance(result, InferenceError)] == list(range(2, 10))
    assert fresh.batches == [list(range(1, 9))]
    stuck.release.set()
    await scene.batcher.drain()
    assert stuck.batches in ([], [[0]])


async def test_the_batch_behind_one_that_breaks_its_copy_is_not_tried_there(copies: Copies) -> None:
    broken, fresh = Slow(lost=True), Fragile()
    scene = copies([broken], lambda: fresh)
    answers = await _one_behind(scene, broken.entered)
    broken.release.set()
    results = await asyncio.gather(*answers)
    assert [float(result["y"][0, 0]) for result in results if not isinstance(result, InferenceError)] == list(range(1, 10))
    assert broken.batches == [[0]]
    assert (scene.reloads, scene.statistics.totals.fail.count) == (1, 0)


def test_a_model_that_is_unloaded_leaves_no_thread() -> None:
    others = set(threading.enumerate())

    async def test() -> None:
        scene = Scene([HeldBackend(), HeldBackend()], None)
        await scene.ask(1)
        await scene.batcher.drain()

    asyncio.run(test())
    for thread in set(threading.enumerate()) - others:
        thread.join(WAIT_S)
        assert not thread.is_alive()


async def test_a_broken_model_that_is_unloaded_is_freed() -> None:
    broken = Fragile(lost=True)
    kept = weakref.ref(broken)
    scene = Scene([broken], Fragile, first_wait_s=3600.0)
    request = InferRequest({"x": np.ones((1, 1), np.float32)}, ("y",), 1, (1,), None, lambda _: None)
    scene.batcher.submit(request)
    while scene.instances[0].is_up:  # noqa: ASYNC110  (nobody is told)
        await asyncio.sleep(0)
    scene.batcher.cancel(request)  # it would be computed by the next copy
    await scene.batcher.drain()
    del broken, scene, request
    while kept() is not None:
        gc.collect()
        await asyncio.sleep(0)


async def test_batches_within_their_time_are_let_be(copies: Copies) -> None:
    backend = HeldBackend(held=True)
    scene = copies([backend], None, max_compute_s=3600.0)
    (instance,) = scene.instances
    for value in range(3):  # together they are looked at more often than one of them may be
        answer = scene.submit(value)
        assert await asyncio.to_thread(backend.entered.wait, WAIT_S)
        for _ in range(LOOKS):
            instance._look(3600.0)  # as the timer does
        backend.entered.clear()
        backend.release.set()
        assert not isinstance(await answer, InferenceError)
        backend.release.clear()
    assert (instance.fault, backend.batches) == (None, [[0], [1], [2]])


async def test_without_reload_a_copy_waits_until_its_thread_is_free(copies: Copies) -> None:
    stuck = HeldBackend(held=True)
    scene = copies([stuck], None, max_compute_s=LIMIT_S)
    (gave_up,) = await scene.ask(1)
    assert "did not answer" in str(gave_up)
    later = scene.submit(2)
    assert not scene.instances[0].is_up
    stuck.release.set()
    assert not isinstance(await later, InferenceError)
    assert stuck.batches == [[1], [2]]


async def test_while_nothing_can_be_loaded_requests_fail_rather_than_wait(copies: Copies) -> None:
    tries = 0

    def refuse_twice() -> Backend:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise ModelLoadError("model.onnx: the device is busy\nand more")
        return Fragile()

    broken = Fragile(lost=True)
    scene = copies([broken], refuse_twice)
    assert await scene.ask(1, 2) == [DOWN.format("is in 1 s")] * 2
    assert scene.instances[0].fault == "model.onnx: the device is busy"
    await scene.up_again()
    assert await scene.ask(3) == [4]


async def test_between_reload_attempts_requests_are_refused_with_the_next_time(copies: Copies) -> None:
    tries, let_load = 0, threading.Event()

    def refuse_once() -> Backend:
        nonlocal tries
        tries += 1
        if tries == 1:
            scene.instances[0].recovery._wait_s = 3600.0  # as after many tries
            raise ModelLoadError("model.onnx: not found")
        assert let_load.wait(WAIT_S)
        return Fragile()

    broken = Fragile(lost=True)
    scene = copies([broken], refuse_once)
    (instance,) = scene.instances
    assert await scene.ask(1) == [DOWN.format("is in 3600 s")]
    with pytest.raises(UnavailableError) as refused:
        scene.submit(2)
    assert str(refused.value) == DOWN.format("is in 3600 s")
    assert refused.value.retry_after_s == pytest.approx(3600, abs=WAIT_S)
    assert scene.statistics.totals.failures == {"unavailable": 2}
    instance.recovery._cancel_timer()
    instance.recovery._begin_load(asyncio.get_running_loop())  # as the timer does
    with pytest.raises(UnavailableError, match="the next attempt is under way") as refused:
        scene.submit(4)
    assert refused.value.retry_after_s == LOADING_S
    let_load.set()
    await scene.up_again()
    assert await scene.ask(5) == [6]


async def test_each_further_fault_doubles_the_wait_until_a_batch_is_computed(copies: Copies) -> None:
    scene = copies([Fragile()], Fragile)
    (instance,) = scene.instances
    for times in (1, 2, 3):
        await scene.ask(-1)
        await scene.up_again(2 * times)
    assert instance.recovery._wait_s == 0.001 * 2**6
    await scene.ask(1)
    assert instance.recovery._wait_s == 0.001


async def test_a_model_without_a_copy_that_is_up_is_not_ready() -> None:
    model = held_model(HeldBackend())
    ready = [model.is_ready]
    model.batcher.instances[0].recovery.is_up = False
    assert [*ready, model.is_ready] == [True, False]
    await model.batcher.drain()


async def test_refusals_are_of_the_kind_that_clients_retry(copies: Copies) -> None:
    broken = Fragile()
    scene = copies([broken], Fragile)
    assert isinstance(await scene.submit(-1), UnavailableError)
