"""Copies of a model that break and hang, behind the real batcher."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.dispatch.short_batches import NOTHING_KNOWN
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.execution.runners import make_instance
from halfserve.serve.engine.execution.tensor_runner import Supervision, TensorRunner
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import FakeBackend

WAIT_S = 60.0
DOWN = "the model failed and cannot be loaded just now (the next attempt {}); try again later, or on another replica"


class Fragile(FakeBackend):
    """Adds 1 to x, until a batch holds a negative value: then its device is lost."""

    def __init__(self, *, lost: bool = False) -> None:
        self.batches: list[list[float]] = []  # the values of each batch that was tried
        self._lost = lost

    def run(self, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        self.batches.append(x[:, 0].tolist())
        self._lost |= bool((x < 0).any())
        if self._lost:
            raise RuntimeError("CUDA failure 700: an illegal memory access was encountered\n  in kernel y")
        return {"y": x + 1}


class Slow(Fragile):
    """Computes nothing until `release` is set; `entered` is set when a batch has come."""

    def __init__(self, *, lost: bool = False) -> None:
        super().__init__(lost=lost)
        self.entered, self.release = threading.Event(), threading.Event()

    def run(self, inputs: Tensors) -> Tensors:
        self.entered.set()
        assert self.release.wait(WAIT_S)
        return super().run(inputs)


def runner_of(instance: Instance) -> TensorRunner:
    """What computes the batches of an instance now."""
    runner = instance.recovery.runner
    assert isinstance(runner, TensorRunner)
    return runner


class Scene:
    """A batcher over some copies, and what its requests got."""

    def __init__(
        self,
        backends: Sequence[Backend],
        reload: Callable[[], Backend] | None,
        *,
        short_s: Mapping[int, float] = NOTHING_KNOWN,
        **how: Any,
    ) -> None:
        self.reloads = 0  # how often a copy was loaded again
        self.statistics = Statistics()

        def load(number: int) -> Backend:
            assert reload is not None
            self.reloads += 1
            return reload()

        supervision = Supervision(label="m/1", reload=None if reload is None else load, **{"first_wait_s": 0.001, **how})
        self.instances = [make_instance(backend, number, supervision) for number, backend in enumerate(backends)]
        self.batcher = Batcher(self.instances, BatchLimits(max_rows=8), self.statistics, short_s)
        self._changed = asyncio.Event()
        for instance in self.instances:
            instance.recovery.on_change = self._notice(instance.recovery.on_change)

    def _notice(self, tell_batcher: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            tell_batcher()
            self._changed.set()

        return changed

    def submit(self, value: float, rows: int = 1) -> asyncio.Future[Tensors | InferenceError]:
        answered: asyncio.Future[Tensors | InferenceError] = asyncio.get_running_loop().create_future()
        x = np.full((rows, 1), value, np.float32)
        self.batcher.submit(InferRequest({"x": x}, ("y",), rows, (1,), None, answered.set_result))
        return answered

    async def ask(self, *values: float) -> list[float | str]:
        """What requests that arrive together get: the answer, or the error's text."""
        results = await asyncio.wait_for(asyncio.gather(*map(self.submit, values)), WAIT_S)
        return [str(r) if isinstance(r, InferenceError) else float(r["y"][0, 0]) for r in results]

    async def up_again(self, times: int = 1) -> None:
        """Wait until the copies have come back so often in all."""
        while sum(instance.restarts for instance in self.instances) < times:
            await self.tried_again()

    async def tried_again(self) -> None:
        await self._changed.wait()
        self._changed.clear()


class Copies:
    def __init__(self) -> None:
        self._scenes: list[Scene] = []

    def __call__(self, backends: Sequence[Backend], reload: Callable[[], Backend] | None, **how: Any) -> Scene:
        self._scenes.append(Scene(backends, reload, **how))
        return self._scenes[-1]

    async def drain(self) -> None:
        for scene in self._scenes:
            await scene.batcher.drain()
