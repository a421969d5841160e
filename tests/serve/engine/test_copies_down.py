"""Models none of whose copies is up, and how they come back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serve.engine.backend import Backend
from serve.engine.batcher import LOADING_S
from serve.engine.errors import InferenceError, ModelLoadError, UnavailableError
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.fragile_copies import DOWN, WAIT_S, Fragile, Scene, run


def test_a_copy_that_cannot_be_loaded_anew_waits_until_its_thread_is_free() -> None:
    async def test() -> None:
        stuck = HeldBackend(held=True)
        scene = Scene([stuck], None, max_compute_s=0.02)
        (gave_up,) = await scene.ask(1)
        assert "did not answer" in str(gave_up)
        later = scene.submit(2)
        assert not scene.instances[0].is_up
        stuck.release.set()
        assert not isinstance(await later, InferenceError)
        assert stuck.batches == [[1], [2]]
        await scene.batcher.drain()

    run(test)


def test_while_nothing_can_be_loaded_requests_fail_rather_than_wait() -> None:
    async def test() -> None:
        tries = 0

        def refuse_twice() -> Backend:
            nonlocal tries
            tries += 1
            if tries <= 2:
                raise ModelLoadError("model.onnx: the device is busy\nand more")
            return Fragile()

        broken = Fragile()
        broken._lost = True
        scene = Scene([broken], refuse_twice)
        assert await scene.ask(1, 2) == [DOWN.format("is in 1 s")] * 2
        assert scene.instances[0].fault == "model.onnx: the device is busy"
        await scene.up_again()
        assert await scene.ask(3) == [4]
        await scene.batcher.drain()

    run(test)


def test_between_two_tries_requests_are_refused_at_once_and_told_when_the_next_one_is() -> None:
    async def test() -> None:
        tries, let_load = 0, threading.Event()

        def refuse_once() -> Backend:
            nonlocal tries
            tries += 1
            if tries == 1:
                scene.instances[0]._wait_s = 3600.0  # as after many tries
                raise ModelLoadError("model.onnx: not found")
            assert let_load.wait(WAIT_S)
            return Fragile()

        broken = Fragile()
        broken._lost = True
        scene = Scene([broken], refuse_once)
        (instance,) = scene.instances
        assert await scene.ask(1) == [DOWN.format("is in 3600 s")]
        with pytest.raises(UnavailableError) as refused:
            scene.submit(2)
        assert str(refused.value) == DOWN.format("is in 3600 s")
        assert refused.value.retry_after_s == pytest.approx(3600, abs=WAIT_S)
        assert scene.statistics.totals.failures == {"unavailable": 2}
        instance._cancel_timer()
        instance._bring_back(asyncio.get_running_loop())  # as the timer does
        with pytest.raises(UnavailableError, match="the next try is under way") as refused:
            scene.submit(4)
        assert refused.value.retry_after_s == LOADING_S
        let_load.set()
        await scene.up_again()
        assert await scene.ask(5) == [6]
        await scene.batcher.drain()

    run(test)


def test_each_further_fault_doubles_the_wait_until_a_batch_is_computed() -> None:
    async def test() -> None:
        scene = Scene([Fragile()], Fragile)
        (instance,) = scene.instances
        for times in (1, 2, 3):
            await scene.ask(-1)
            await scene.up_again(2 * times)
        assert instance._wait_s == 0.001 * 2**6
        await scene.ask(1)
        assert instance._wait_s == 0.001
        await scene.batcher.drain()

    run(test)


def test_a_model_without_a_copy_that_is_up_is_not_ready() -> None:
    async def test() -> None:
        model = held_model(HeldBackend())
        ready = [model.is_ready]
        model.batcher.instances[0].is_up = False
        assert [*ready, model.is_ready] == [True, False]
        await model.batcher.drain()

    run(test)


def test_refusals_are_of_the_kind_that_clients_retry() -> None:
    async def test() -> None:
        broken = Fragile()
        scene = Scene([broken], Fragile)
        assert isinstance(await scene.submit(-1), UnavailableError)
        await scene.batcher.drain()

    run(test)
