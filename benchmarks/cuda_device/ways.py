"""The ways to a model: alone on prepared batches, and behind a server of its own.

Alone on a device is a loop over one session with the server's options: inputs and outputs in locked memory, bound by IOBinding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cuda_device.networks import Network
from benchmarks.harness.server_process import served
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.session import SessionOpener
from halfserve.serve.backends.onnx_runtime.session_settings import read_settings
from halfserve.serve.backends.runtimes import probing_runtimes
from halfserve.serve.benchmark.load_target import RequestSettings, SharedMemory
from halfserve.serve.benchmark.measurement import Bench
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.cuda_driver import locked_buffer
from halfserve.serve.engine.tensors import Array, Tensors

WARM_UPS = 3  # batches alone: computes, makes the buffers of a recording and records


class Alone:
    """A loaded model, called directly, without a queue."""

    def __init__(
        self, path: Path, placement: DevicePlacement, options: Mapping[str, str] | None = None, *, graphs: bool = False
    ) -> None:
        """Load the file as the server does, with options of the CUDA provider, and with CUDA graphs if `graphs`.

        Raises:
            ModelLoadError: it cannot be loaded.
        """
        self.path, self.placement = path, placement
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
        run = self.batch(feeds)
        for _ in range(WARM_UPS):
            run()
        taken: list[int] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or not taken:
            began = time.perf_counter_ns()
            run()
            taken.append(time.perf_counter_ns() - began)
        return statistics.median(taken) / 1e6

    def batch(self, feeds: Tensors) -> Callable[[], object]:
        """Return what computes this batch: on a device from and into locked memory, unless graphs are recorded."""
        ready = {name: array.astype(self.backend.compute_dtype(name), copy=False) for name, array in feeds.items()}
        fixed = locked(ready) if self.placement.use_gpu and not self.config.optimization.cuda.graphs else None
        if fixed is None:
            return partial(self.backend.run, ready)
        binding = self.session.io_binding()
        outputs = locked(self.backend.run(fixed)) or {}
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

        def run() -> object:
            for name, array in fixed.items():
                binding.bind_cpu_input(name, array)  # copies to the device
            self.session.run_with_iobinding(binding)
            return outputs

        return run

    @cached_property
    def session(self) -> Any:
        """A session of the runtime with the server's options."""
        settings = read_settings(self.config, self.path)
        return SessionOpener(path=self.path, placement=self.placement, settings=settings).open().session


def locked(feeds: Tensors) -> dict[str, Array] | None:
    """Return the batch in locked memory, from which the first device copies by itself; None if there is no such memory."""
    found: dict[str, Array] = {}
    for name, array in feeds.items():
        buffer = locked_buffer(array.nbytes, 0)
        if buffer is None:
            return None
        found[name] = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(found[name], array)
    return found


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
