"""Requests whose copy of the model broke, tried once more on another."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from serve.engine.errors import InferenceError, ModelLoadError
from serve.engine.requests import InferRequest
from tests.serve.engine.fragile_copies import WAIT_S, Fragile, Scene, Slow, run


def test_a_copy_whose_device_is_lost_is_loaded_anew_and_its_requests_are_replayed_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        first, second = Fragile(), Fragile()
        first._lost = True
        scene = Scene([first], lambda: second)
        assert await scene.ask(1, 2, 3) == [2, 3, 4]
        assert (first.batches, second.batches) == ([[1, 2, 3]], [[1], [2], [3]])
        (instance,) = scene.instances
        assert (scene.reloads, instance.restarts, instance.is_up) == (1, 1, True)
        assert instance.fault == "CUDA failure 700: an illegal memory access was encountered"
        assert (scene.statistics.totals.success.count, scene.statistics.totals.fail.count) == (3, 0)
        await scene.batcher.drain()

    run(test)
    out, up = (record.getMessage() for record in caplog.records)
    assert out == (
        "m/1 instance 0: is taken out (CUDA failure 700: an illegal memory access was encountered); it is loaded anew "
        "in 0.001 s"
    )
    assert up == "m/1 instance 0: is up again"


def test_what_breaks_copy_after_copy_fails_the_second_time() -> None:
    async def test() -> None:
        scene = Scene([Fragile()], Fragile)
        assert await scene.ask(-1) == ["the device failed while it computed this request; send it again"]
        assert await scene.ask(5) == [6]
        assert scene.reloads == 2
        await scene.batcher.drain()

    run(test)


def test_what_breaks_copies_takes_no_others_along() -> None:
    async def test() -> None:
        scene = Scene([Fragile()], Fragile)
        assert await scene.ask(1, -1, 3) == [2, "the device failed while it computed this request; send it again", 4]
        assert scene.reloads == 2
        await scene.batcher.drain()

    run(test)


def test_another_copy_takes_over_at_once() -> None:
    async def test() -> None:
        good, broken = Fragile(), Fragile()
        broken._lost = True
        scene = Scene([good, broken], Fragile, first_wait_s=3600.0)
        assert await scene.ask(1, 2) == [2, 3]
        assert [instance.is_up for instance in scene.instances] == [True, False]
        assert await scene.ask(7) == [8]
        assert scene.reloads == 0
        await scene.batcher.drain()

    run(test)


def test_a_copy_that_cannot_be_loaded_anew_leaves_the_others_serving() -> None:
    def load() -> Fragile:
        raise ModelLoadError("the file is gone")

    async def test() -> None:
        broken = Fragile()
        broken._lost = True
        scene = Scene([Fragile(), broken], load)
        assert await scene.ask(1) == [2]
        while scene.reloads < 2:  # so it could not be loaded the first time
            await scene.tried_again()
        assert broken.batches == [[1]]
        assert await scene.ask(3) == [4]
        await scene.batcher.drain()

    run(test)


def test_a_request_cancelled_while_its_copy_breaks_is_not_replayed() -> None:
    async def test() -> None:
        first, second = Slow(), Fragile()
        scene = Scene([first], lambda: second)
        gone = InferRequest({"x": np.array([[-1.0]], np.float32)}, ("y",), 1, (1,), None, lambda _: None)
        scene.batcher.submit(gone)
        assert await asyncio.to_thread(first.entered.wait, WAIT_S)
        scene.batcher.cancel(gone)
        first.release.set()
        await scene.up_again()
        assert second.batches == []
        await scene.batcher.drain()

    run(test)


def test_draining_waits_for_what_is_replayed() -> None:
    async def test() -> None:
        broken = Fragile()
        broken._lost = True
        scene = Scene([broken], Fragile)
        answer = scene.submit(1)
        await asyncio.sleep(0)
        await scene.batcher.drain()
        assert not isinstance(answer.result(), InferenceError)

    run(test)


class OnCpu(Fragile):
    provider = "CPUExecutionProvider"


class SlowOnCpu(Slow):
    provider = "CPUExecutionProvider"


def test_what_is_replayed_before_a_short_batch_does_not_take_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        loop, told = asyncio.get_running_loop(), threading.Event()
        good, broken = OnCpu(), SlowOnCpu()
        scene = Scene([good, broken], OnCpu, short_s={1: 1e-6})
        broken._lost = True
        lost = scene.submit(1, rows=2)  # nothing is known of batches of two rows: it is computed on a thread
        assert await asyncio.to_thread(broken.entered.wait, WAIT_S)
        tell = loop.call_soon_threadsafe

        def tell_both(*what: Any) -> None:
            tell(*what)
            told.set()

        monkeypatch.setattr(loop, "call_soon_threadsafe", tell_both)
        broken.release.set()
        assert told.wait(WAIT_S)  # the end of the one and the beginning of the other are for the same turn of the loop
        short = scene.submit(5)
        answers = await asyncio.gather(lost, short)
        assert [not isinstance(answer, InferenceError) and answer["y"][:, 0].tolist() for answer in answers] == [[2, 2], [6]]
        assert good.batches == [[5], [1, 1]]
        await scene.batcher.drain()

    run(test)
