"""The ways to a model: alone on prepared batches, behind the engine's queue in this process, and behind a server of its own."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.cuda_device.networks import Network
from benchmarks.harness.server_process import served
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.runtimes import probing_runtimes
from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.benchmark.load_target import RequestSettings, SharedMemory
from halfserve.serve.benchmark.measurement import Bench, Goal, Measurement, best_of, measure, search
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.cuda_driver import locked_buffer
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.loaded_version import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest, RawInput, RawInputs, RawLayout
from halfserve.serve.engine.tensors import Array, Tensors

WARM_UPS = 3  # batches alone: computes, makes the buffers of a recording and records
WARM_UP_S = 0.5  # behind the queue
LOWEST, HIGHEST = 0.25, 1.5  # bounds of the search, relative to the rate alone


class Alone:
    """A loaded model, called directly, without a queue."""

    def __init__(
        self, path: Path, placement: DevicePlacement, options: Mapping[str, str] | None = None, *, graphs: bool = False
    ) -> None:
        """Load the file as the server does, with options of the CUDA provider, and with CUDA graphs if `graphs`.

        Raises:
            ModelLoadError: it cannot be loaded.
        """
        self.config = ModelConfig()
        accelerator = self.config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="cuda")
        accelerator.parameters.update(options or {})
        self.config.optimization.cuda.graphs = graphs
        runtimes = probing_runtimes()
        self.interface = runtimes.describe(path)
        self.backend: Backend = runtimes.load(path, self.interface, placement, self.config)

    @property
    def nodes(self) -> str:
        """Numbers of nodes by provider, such as "CUDAExecutionProvider=31, CPUExecutionProvider=2"."""
        return self.config.parameters["halfserve.nodes"].string_value

    def run(self, feeds: Tensors) -> Tensors:
        """Compute a batch."""
        return self.backend.run({name: array.astype(self.backend.compute_dtype(name)) for name, array in feeds.items()})

    def milliseconds(self, feeds: Tensors, seconds: float) -> float:
        """Median time of a batch, including its copies to the device and back, over `seconds` of batches, in milliseconds."""
        ready = {name: array.astype(self.backend.compute_dtype(name), copy=False) for name, array in feeds.items()}
        for _ in range(WARM_UPS):
            self.backend.run(ready)
        taken: list[int] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or not taken:
            began = time.perf_counter_ns()
            self.backend.run(ready)
            taken.append(time.perf_counter_ns() - began)
        return statistics.median(taken) / 1e6


def locked(feeds: Tensors) -> dict[str, Array] | None:
    """The batch in locked memory, from which the first device copies by itself; None if there is no such memory."""
    found: dict[str, Array] = {}
    for name, array in feeds.items():
        buffer = locked_buffer(array.nbytes, 0)
        if buffer is None:
            return None
        found[name] = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(found[name], array)
    return found


def rows_per_second(
    path: Path, placement: DevicePlacement, row: Tensors, *, batch_size: int, in_flight: int, seconds: float
) -> float:
    """Requests a second of one row that a closed loop has answered, over `seconds` after a warm-up.

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


def each_way(network: Network, precision: str, placement: DevicePlacement, size: int) -> Iterator[tuple[str, Bench]]:
    """Name of each way to send tensors, and a server with batches of up to `size` that gets requests of one row so."""
    where = "--require-gpu" if placement.use_gpu else "--cpu"
    ways: dict[str, SharedMemory | None] = {"gRPC": None, "system memory": "system"}
    if placement.use_gpu:
        ways["CUDA memory"] = "cuda"
    for name, kind in ways.items():
        requests = RequestSettings(given=network.feeds(precision, 1), shared_memory=kind)
        with served(network.path(precision), size, placement.threads, requests, ["--shared-memory"], where) as contestant:
            yield name, contestant.bench


def highest(bench: Bench, goal: Goal, alone: float, how: Measurement) -> Level | None:
    """The level with the highest rate that meets a goal; None if none does. `alone` is the rows a second without a server."""
    levels = []
    with suppress(BenchmarkError):  # raised if the lowest rate does not meet the goal
        for level in search([Load(rate=LOWEST * alone), Load(rate=HIGHEST * alone)], goal, partial(measure, bench, how=how)):
            levels.append(level)  # noqa: PERF402  (as far as it comes)
    return best_of(levels, goal)
