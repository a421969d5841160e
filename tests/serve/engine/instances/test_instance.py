"""Copies of a model that hang, and the batches behind them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from serve.engine.errors import InferenceError
from serve.engine.instances.instance import LOOKS
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors
from serve.engine.worker import Worker
from tests.serve.engine.fakes import HeldBackend
from tests.serve.engine.fragile_copies import WAIT_S, Fragile, Scene, Slow, run


def test_a_batch_that_hangs_is_given_up_and_the_copy_loaded_anew() -> None:
    async def test() -> None:
        stuck, fresh = HeldBackend(held=True), HeldBackend()
        scene = Scene([stuck], lambda: fresh, max_compute_s=0.02)
        assert (
            await scene.ask(1, 2) == ["the model did not answer within its 0.02 s and is being restarted; try again later"] * 2
        )
        await scene.up_again()
        # What the stuck thread still finds out is of no interest any more.
        stuck.release.set()
        assert await scene.ask(3) == [4]
        assert (stuck.batches in ([], [[1, 2]]), fresh.batches) == (True, [[3]])
        assert scene.statistics.totals.fail.count == 2
        await scene.batcher.drain()

    run(test)


def test_a_copy_that_hangs_is_answered_for_and_comes_back_though_no_thread_can_be_started_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = iter(["refused", "refused"])

    class Scarce(Worker):
        def __init__(self, name: str) -> None:
            if next(starts, None) is not None:
                raise RuntimeError("can't start new thread")
            super().__init__(name)

    async def test() -> None:
        stuck, fresh = HeldBackend(held=True), HeldBackend()
        scene = Scene([stuck], lambda: fresh, max_compute_s=0.02)
        monkeypatch.setattr("serve.engine.instances.instance.Worker", Scarce)
        assert await scene.ask(1) == ["the model did not answer within its 0.02 s and is being restarted; try again later"]
        await scene.up_again()
        assert scene.instances[0].fault == "can't start new thread"
        assert await scene.ask(3) == [4]
        assert (next(starts, None), fresh.batches) == (None, [[3]])
        stuck.release.set()
        await scene.batcher.drain()

    run(test)


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


def test_the_batch_behind_one_that_hangs_is_computed_by_the_next_copy() -> None:
    async def test() -> None:
        stuck, fresh = HeldBackend(held=True), HeldBackend()
        scene = Scene([stuck], lambda: fresh, max_compute_s=0.1)
        first, *behind = await asyncio.gather(*await _one_behind(scene, stuck.entered))
        assert isinstance(first, InferenceError)
        assert "did not answer" in str(first)
        assert [result["y"][0, 0] for result in behind if not isinstance(result, InferenceError)] == list(range(2, 10))
        assert fresh.batches == [list(range(1, 9))]
        stuck.release.set()
        await scene.batcher.drain()
        assert stuck.batches in ([], [[0]])

    run(test)


def test_the_batch_behind_one_that_breaks_its_copy_is_not_tried_there() -> None:
    async def test() -> None:
        broken, fresh = Slow(), Fragile()
        broken._lost = True
        scene = Scene([broken], lambda: fresh)
        answers = await _one_behind(scene, broken.entered)
        broken.release.set()
        results = await asyncio.gather(*answers)
        assert [float(result["y"][0, 0]) for result in results if not isinstance(result, InferenceError)] == list(range(1, 10))
        assert broken.batches == [[0]]
        assert (scene.reloads, scene.statistics.totals.fail.count) == (1, 0)
        await scene.batcher.drain()

    run(test)


def test_a_model_that_is_unloaded_leaves_no_thread() -> None:
    others = set(threading.enumerate())

    async def test() -> None:
        scene = Scene([HeldBackend(), HeldBackend()], None)
        await scene.ask(1)
        await scene.batcher.drain()

    run(test)
    for thread in set(threading.enumerate()) - others:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_model_that_is_unloaded_while_it_is_broken_is_not_kept_to_be_loaded_anew() -> None:
    async def test() -> None:
        broken = Fragile()
        broken._lost = True
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

    run(test)


def test_batches_within_their_time_are_let_be() -> None:
    async def test() -> None:
        backend = HeldBackend(held=True)
        scene = Scene([backend], None, max_compute_s=3600.0)
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
        await scene.batcher.drain()

    run(test)
