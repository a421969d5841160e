"""A model without a queue, run on prepared batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.runtimes import probing_runtimes
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.cuda_driver import locked_buffer
from halfserve.serve.engine.tensors import Array, Tensors

WARM_UPS = 3  # computes, makes the buffers of a recording and records


class Alone:
    """A loaded model, called directly."""

    def __init__(
        self, path: Path, placement: DevicePlacement, options: Mapping[str, str] | None = None, *, graphs: bool = False
    ) -> None:
        """Load it as the server does.

        Args:
            path: the model file.
            placement: device to run on.
            options: options of the CUDA provider.
            graphs: whether to record CUDA graphs.

        Raises:
            ModelLoadError: it cannot be loaded.
        """
        self.config = ModelConfig()
        accelerator = self.config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="cuda")
        accelerator.parameters.update(options or {})
        self.config.optimization.cuda.graphs = graphs
        runtimes = probing_runtimes()
        self.backend: Backend = runtimes.load(path, runtimes.describe(path), placement, self.config)

    @property
    def nodes(self) -> str:
        """Numbers of nodes by provider, such as "CUDAExecutionProvider=31, CPUExecutionProvider=2"."""
        return self.config.parameters["halfserve.nodes"].string_value

    def run(self, feeds: Tensors) -> Tensors:
        """Compute a batch."""
        return self.backend.run({name: array.astype(self.backend.compute_dtype(name)) for name, array in feeds.items()})

    def milliseconds(self, feeds: Tensors, seconds: float) -> float:
        """Median time of a batch, including its copies to the device and back, in milliseconds.

        Args:
            feeds: the batch.
            seconds: time in seconds for which it is computed repeatedly.
        """
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
