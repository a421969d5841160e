"""Requests to the real batcher, and their results."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend, held_model


class Answers:
    def __init__(self) -> None:
        self.results: dict[float, list[Tensors | InferenceError]] = {}
        self.models: list[Model] = []
        self._news = asyncio.Event()

    def model(self, backend: HeldBackend | None = None, **how: Any) -> Model:
        """See `held_model`; it is drained after the test."""
        self.models.append(held_model(backend or HeldBackend(), **how))
        return self.models[-1]

    def submit(self, model: Model, *values: float) -> None:
        for value in values:
            model.scheduler.submit(self.request(value))

    async def busy_model(self, **how: Any) -> tuple[HeldBackend, Model]:
        """A model whose worker is held at a request of 100, so that what comes next has to queue."""
        backend = HeldBackend(held=True)
        model = self.model(backend, **how)
        await hold_first(backend, model.batcher, self)
        return backend, model

    def request(
        self, value: float, *, deadline: float | None = None, leave_by: float | None = None, rows: int = 1
    ) -> InferRequest:
        results = self.results.setdefault(value, [])

        def done(result: Tensors | InferenceError) -> None:
            results.append(result)
            self._news.set()

        x = np.full((rows, 1), value, np.float32)
        return InferRequest({"x": x}, ("y",), rows, (1,), deadline, done, leave_by=leave_by)

    async def all(self, count: int) -> None:
        while sum(map(len, self.results.values())) < count:
            await asyncio.wait_for(self._news.wait(), 20)
            self._news.clear()

    async def drain(self) -> None:
        for model in self.models:
            await model.scheduler.drain()

    def value(self, of: float) -> Any:
        (result,) = self.results[of]
        assert not isinstance(result, InferenceError), result
        return float(result["y"][0, 0])

    def error(self, of: float) -> InferenceError:
        (result,) = self.results[of]
        assert isinstance(result, InferenceError)
        return result


async def hold_first(backend: HeldBackend, batcher: Batcher, answers: Answers) -> None:
    """Occupy the worker, so that what comes next has to queue."""
    batcher.submit(answers.request(100))
    assert await asyncio.to_thread(backend.entered.wait, 20)


class QuickBackend(HeldBackend):
    """On the CPU; notes the thread of each batch."""

    provider = "CPUExecutionProvider"

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def run(self, inputs: Tensors) -> Tensors:
        self.threads.append(threading.get_ident())
        return super().run(inputs)
