"""The next large batch of an instance is gathered while the instance computes."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import InferenceError, NotFoundError
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.execution.staging import STAGED_BYTES
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array, RawInput, RawInputs, RawLayout, Tensors
from tests.serve.engine.fakes import HeldBackend
from tests.serve.engine.fragile_copies import WAIT_S, Copies, Scene, runner_of

ROWS = 8  # rows of a full batch
AHEAD_S = 0.004  # time of a batch that another one may wait behind


class Noting(HeldBackend):
    def __init__(self, *, held: bool = False) -> None:
        super().__init__(held=held)
        self.arrays: list[Array] = []  # the inputs of each batch that was computed

    def run(self, inputs: Tensors) -> Tensors:
        self.arrays.append(inputs["x"])
        return super().run(inputs)


class Source:
    """The bytes of requests, and who reads them."""

    def __init__(self, width: int, *, missing: float | None = None) -> None:
        """`missing`: the request whose bytes are not there."""
        self._width = width
        self._missing = missing
        self.reads: list[float] = []  # the values that were read, in order
        self.threads: set[str] = set()  # kinds of the threads that read
        self.all_read = threading.Event()  # set once `ROWS` values were read, or those of a request were not there

    def request(self, value: float, done: Callable[[Any], None]) -> InferRequest:
        x = np.full((1, self._width), value, np.float32)
        data = x.tobytes()

        def read(target: memoryview) -> None:
            self.threads.add(threading.current_thread().name.partition("-")[0])
            if value == self._missing:
                self.all_read.set()
                raise NotFoundError("the region is gone")
            self.reads.append(value)
            target[:] = data
            if len(self.reads) >= ROWS:
                self.all_read.set()

        layout = RawLayout((RawInput("x", x.dtype, x.shape, x.size, x.nbytes),))
        inputs = RawInputs(layout, b"", (0,), (read,))
        return InferRequest(inputs, ("y",), 1, (1,), None, done, size=x.nbytes)


async def behind(scene: Scene, source: Source, *values: float) -> list[asyncio.Future[Tensors | InferenceError]]:
    """A request that is being computed, and a full batch behind it, with the values of its first rows."""
    first = scene.submit(100)
    assert isinstance(backend := runner_of(scene.instances[0]).backend, HeldBackend)
    assert await asyncio.to_thread(backend.entered.wait, WAIT_S)
    scene.batcher._free.latest_s = AHEAD_S
    answers = [first]
    for value in [*values, *range(len(values) + 1, ROWS + 1)]:
        answered: asyncio.Future[Tensors | InferenceError] = asyncio.get_running_loop().create_future()
        scene.batcher.submit(source.request(value, answered.set_result))
        answers.append(answered)
    for _ in range(5):
        await asyncio.sleep(0)
    assert scene.instances[0].batches == 2
    return answers


def numbers(results: list[Tensors | InferenceError]) -> list[Any]:
    return [type(result) if isinstance(result, InferenceError) else float(result["y"][0, 0]) for result in results]


LARGE = STAGED_BYTES // 4 // ROWS  # floats of a request, of which a full batch is staged


@pytest.mark.parametrize("padded", [(), (2 * ROWS,)], ids=["plain", "padded"])
async def test_the_next_batch_is_gathered_while_one_computes(copies: Copies, padded: tuple[int, ...]) -> None:
    backend, source = Noting(held=True), Source(LARGE)
    scene = copies([backend], None, padded_sizes=padded)
    answers = await behind(scene, source)
    assert await asyncio.to_thread(source.all_read.wait, WAIT_S)
    assert len(backend.arrays) == 1, "the batch before is still being computed"
    backend.release.set()
    assert numbers(await asyncio.gather(*answers)) == [101, *range(2, ROWS + 2)]
    assert source.reads == list(range(1, ROWS + 1)), "clients may change shared memory, so that it is read once"
    assert source.threads == {"staging"}
    assert len(backend.arrays[1]) == max(ROWS, *padded, 0)


async def test_staged_batches_reuse_the_second_set_of_buffers(copies: Copies) -> None:
    backend = Noting(held=True)
    scene = copies([backend], None)
    for _ in range(2):
        backend.entered.clear()
        answers = await behind(scene, Source(LARGE))
        backend.release.set()
        await asyncio.gather(*answers)
        backend.release.clear()
    one, other = (array for array in backend.arrays if len(array) == ROWS)
    assert np.shares_memory(one, other)
    (instance,) = scene.instances
    assert [len(buffers._buffers) for buffers in runner_of(instance)._staging.buffers] == [0, 1]


async def test_small_batches_need_no_second_thread(copies: Copies) -> None:
    backend, source = Noting(held=True), Source(LARGE // 2)
    scene = copies([backend], None)
    answers = await behind(scene, source)
    assert runner_of(scene.instances[0])._staging._worker is None
    backend.release.set()
    assert numbers(await asyncio.gather(*answers)) == [101, *range(2, ROWS + 2)]
    assert source.threads == {"instance"}


async def test_a_staged_request_that_comes_too_late_is_not_computed(copies: Copies) -> None:
    backend, source = Noting(held=True), Source(LARGE)
    scene = copies([backend], None)
    answers = await behind(scene, source)
    assert await asyncio.to_thread(source.all_read.wait, WAIT_S)
    scene.instances[0].next_requests[0].deadline = 0.0
    backend.release.set()
    late, *others = numbers(await asyncio.gather(*answers))[1:]
    assert isinstance(late, type)
    assert others == list(range(3, ROWS + 2))
    assert backend.batches[1] == list(range(2, ROWS + 1))


async def test_a_staged_batch_that_fails_is_bisected(copies: Copies) -> None:
    backend, source = Noting(held=True), Source(LARGE)
    scene = copies([backend], None)
    answers = await behind(scene, source, 1, 2, -3)
    backend.release.set()
    results = numbers(await asyncio.gather(*answers))
    assert isinstance(results.pop(3), type)
    assert results == [101, 2, 3, *range(5, ROWS + 2)]


async def test_a_staged_request_whose_bytes_are_gone_fails_alone(copies: Copies) -> None:
    backend, source = Noting(held=True), Source(LARGE, missing=2)
    scene = copies([backend], None)
    answers = await behind(scene, source)
    assert await asyncio.to_thread(source.all_read.wait, WAIT_S)
    backend.release.set()
    assert numbers(await asyncio.gather(*answers)) == [101, 2, NotFoundError, *range(4, ROWS + 2)]


async def test_the_next_copy_does_not_use_the_buffers_of_one_that_hangs(copies: Copies) -> None:
    stuck, fresh, source = Noting(held=True), Noting(), Source(LARGE)
    scene = copies([stuck], lambda: fresh, max_compute_s=0.5)
    before = runner_of(scene.instances[0])._staging
    first, *others = numbers(await asyncio.gather(*await behind(scene, source)))
    assert isinstance(first, type)
    assert others == list(range(2, ROWS + 2))
    assert runner_of(scene.instances[0])._staging is not before
    assert fresh.batches == [list(range(1, ROWS + 1))]
    stuck.release.set()


async def test_a_batch_in_doubt_is_gathered_when_its_turn_comes(copies: Copies) -> None:
    backend, source, invariance = Noting(held=True), Source(LARGE), BatchInvariance("m/1")
    invariance.is_doubtful = True
    scene = copies([backend], None, invariance=invariance)
    answers = await behind(scene, source)
    assert runner_of(scene.instances[0])._staging._worker is None
    backend.release.set()
    assert numbers(await asyncio.gather(*answers)) == [101, *range(2, ROWS + 2)]


async def test_without_a_second_thread_batches_are_gathered_in_turn(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> Worker:
        raise RuntimeError("can't start new thread")

    backend, source = Noting(held=True), Source(LARGE)
    scene = copies([backend], None)
    monkeypatch.setattr("halfserve.serve.engine.execution.staging.Worker", refused)
    answers = await behind(scene, source)
    backend.release.set()
    assert numbers(await asyncio.gather(*answers)) == [101, *range(2, ROWS + 2)]
    assert source.threads == {"instance"}


async def test_batches_end_in_order_even_if_the_loop_learns_of_the_first_last(copies: Copies) -> None:
    backend, source = Noting(held=True), Source(LARGE)
    scene = copies([backend], None)
    (instance,) = scene.instances
    answers = await behind(scene, source)
    deaf = instance._jobs[0].loop = asyncio.new_event_loop()  # does not run
    backend.release.set()
    assert numbers(await asyncio.gather(*answers)) == [101, *range(2, ROWS + 2)]
    assert instance.batches == 0
    deaf.close()


def test_an_unloaded_model_leaves_no_staging_thread_and_no_buffers() -> None:
    others = set(threading.enumerate())
    freed: list[weakref.ref[Array]] = []

    async def test() -> None:
        backend, source = HeldBackend(held=True), Source(LARGE)
        scene = Scene([backend], None)
        answers = await behind(scene, source)
        backend.release.set()
        await asyncio.gather(*answers)
        buffers = runner_of(scene.instances[0])._staging.buffers[1]
        freed.extend(weakref.ref(array) for array in buffers._buffers.values())
        await scene.batcher.drain()

    asyncio.run(test())
    for thread in set(threading.enumerate()) - others:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    gc.collect()
    assert [reference() for reference in freed] == [None]
