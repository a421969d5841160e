"""Copies of a model that break, hang and come back, behind the real batcher."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from serve.engine.backend import Backend
from serve.engine.batch_limits import BatchLimits
from serve.engine.batcher import Batcher
from serve.engine.errors import InferenceError, ModelLoadError, UnavailableError
from serve.engine.instance import LOOKS, Instance
from serve.engine.requests import InferRequest
from serve.engine.statistics import Statistics
from serve.engine.supervision import Supervision
from serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model

WAIT_S = 20.0
DOWN = "the model failed and cannot be loaded anew just now (the next try {}); try again later, or on another replica"


class Fragile:
    """Adds 1 to x, until a batch holds a negative value: then its device is lost.

    Attributes:
        batches: the values of each batch that was tried.
    """

    provider = "test"
    precision = "fp32"

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self._lost = False

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def run(self, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        self.batches.append(x[:, 0].tolist())
        self._lost |= bool((x < 0).any())
        if self._lost:
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered\n  in kernel y")
        return {"y": x + 1}


class Slow(Fragile):
    """Computes nothing until `release` is set; `entered` is set when a batch has come."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def run(self, inputs: Tensors) -> Tensors:
        self.entered.set()
        assert self.release.wait(WAIT_S)
        return super().run(inputs)


class Scene:
    """A batcher over some copies, and what its requests got.

    Attributes:
        reloads: how often a copy was loaded anew.
    """

    def __init__(self, backends: Sequence[Backend], reload: Callable[[], Backend] | None, **how: Any) -> None:
        self.reloads = 0
        self.statistics = Statistics()

        def load(number: int) -> Backend:
            assert reload is not None
            self.reloads += 1
            return reload()

        supervision = Supervision(label="m/1", reload=None if reload is None else load, **{"first_wait_s": 0.001, **how})
        self.instances = [Instance(backend, number, supervision) for number, backend in enumerate(backends)]
        self.batcher = Batcher(self.instances, BatchLimits(max_rows=8), self.statistics)
        self._changed = asyncio.Event()
        for instance in self.instances:
            instance.on_change = self._notice(instance.on_change)

    def _notice(self, tell_batcher: Callable[[Instance], None]) -> Callable[[Instance], None]:
        def changed(instance: Instance) -> None:
            tell_batcher(instance)
            self._changed.set()

        return changed

    def submit(self, value: float) -> asyncio.Future[Tensors | InferenceError]:
        answered: asyncio.Future[Tensors | InferenceError] = asyncio.get_running_loop().create_future()
        x = np.array([[value]], np.float32)
        self.batcher.submit(InferRequest({"x": x}, ("y",), 1, (1,), None, answered.set_result))
        return answered

    async def ask(self, *values: float) -> list[float | str]:
        """What requests that arrive together get: the answer, or the error's text."""
        results = await asyncio.wait_for(asyncio.gather(*map(self.submit, values)), WAIT_S)
        return [str(r) if isinstance(r, InferenceError) else float(r["y"][0, 0]) for r in results]

    async def up_again(self, times: int = 1) -> None:
        """Wait until the copies have come back so often in all."""
        while sum(instance.restarts for instance in self.instances) < times:
            await self._changed.wait()
            self._changed.clear()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(), WAIT_S)

    asyncio.run(main())


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
        assert scene.statistics.totals.failures == {"unavailable": 2}
        instance._cancel_timer()
        instance._bring_back(asyncio.get_running_loop())  # as the timer does
        with pytest.raises(UnavailableError, match="the next try is under way"):
            scene.submit(4)
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
