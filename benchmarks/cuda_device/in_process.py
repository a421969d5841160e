"""A model behind the engine's queue, in this process: without a transport, but with batches formed from requests of one row."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

from halfserve.serve.backends.runtimes import probing_runtimes
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.loaded_version import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest, RawInput, RawInputs, RawLayout
from halfserve.serve.engine.tensors import Tensors

WARM_UP_S = 0.5


def rows_per_second(
    path: Path, placement: DevicePlacement, row: Tensors, *, batch_size: int, in_flight: int, seconds: float
) -> float:
    """Requests a second that are answered in a closed loop.

    Args:
        path: the model file.
        placement: device to run on.
        row: the inputs of every request.
        batch_size: largest batch size.
        in_flight: number of concurrent requests.
        seconds: duration of the measurement after a warm-up.

    Raises:
        InferenceError: a request fails.
    """
    (files,) = find_models(path)
    model = load_model(files, probing_runtimes(), placement, Defaults(max_batch_size=batch_size))
    return asyncio.run(_ClosedLoop(model, row, seconds).run(in_flight))


class _ClosedLoop:
    def __init__(self, model: Model, row: Tensors, seconds: float) -> None:
        self._core = InferenceCore([model])
        self._model = model
        self._inputs = _raw(row)
        self._began = time.monotonic() + WARM_UP_S
        self._end = self._began + seconds
        self._answered = self._waiting = 0
        self._failure: InferenceError | None = None
        self._over = asyncio.Event()

    async def run(self, in_flight: int) -> float:
        for _ in range(in_flight):
            self._send()
        await self._over.wait()
        self._core.retire()
        await self._core.drain()
        if self._failure is not None:
            raise self._failure
        return self._answered / (self._end - self._began)

    def _send(self) -> None:
        self._waiting += 1
        outputs = tuple(self._model.outputs)
        self._core.submit(self._model, InferRequest(self._inputs, outputs, 1, 1, None, self._done))

    def _done(self, result: Tensors | InferenceError) -> None:
        self._waiting -= 1
        now = time.monotonic()
        if isinstance(result, InferenceError):
            self._failure = result
        else:
            for name in result:
                result[name].tobytes()  # as a transport does
            self._answered += self._began <= now < self._end
        if now < self._end and self._failure is None:
            self._send()
        elif not self._waiting:
            self._over.set()


def _raw(row: Tensors) -> RawInputs:
    """The inputs in the form of the wire."""
    entries, data = [], b""
    offsets = []
    for name, array in row.items():
        entries.append(RawInput(name, np.dtype(array.dtype), array.shape, array.size, array.nbytes))
        offsets.append(len(data))
        data += array.tobytes()
    return RawInputs(RawLayout(tuple(entries)), data, tuple(offsets))
