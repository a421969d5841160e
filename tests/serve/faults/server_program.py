"""A server with injected faults: python -m tests.serve.faults.server_program PATH ACCESS_LOG

Every reading of the wall clock returns another day, sometimes an earlier one. The model "fragile" loses its device on a
negative number, as CUDA does, until it is loaded again. Everything else is as in `halfserve serve`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.model_control.control_options import ALL, ControlMode, ControlOptions
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions
from halfserve.serve.process import leave_threads_behind
from halfserve.serve.server import ServerOptions, serve
from halfserve.serve.startup_report import StartupReport

DAY_S = 86_400
FRAGILE = "fragile"
FAULT = "CUDA failure 700: an illegal memory access was encountered"
DAYS = itertools.cycle((0, 9000, -9000, 1, -1, 365))


class Fragile:
    """A backend whose device is lost from the first negative number on."""

    def __init__(self, backend: Backend, runtime: FragileRuntime) -> None:
        self._backend = backend
        self._runtime = runtime
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, inputs: Tensors) -> Tensors:
        if any(bool((array < 0).any()) for array in inputs.values()):
            self._lost = self._runtime.has_lost_a_device = True
        if self._lost:
            raise RuntimeError(FAULT)
        return self._backend.run(inputs)


class FragileRuntime(OnnxRuntime):
    """The model "fragile" loses its device on a negative number, as CUDA does."""

    def __init__(self, *, has_only_one: bool = False) -> None:
        """`has_only_one`: whether no model can be loaded any more once the device is lost."""
        super().__init__()
        self._has_only_one = has_only_one
        self.has_lost_a_device = False

    def load(self, path: Path, *rest: Any) -> Any:
        if self._has_only_one and self.has_lost_a_device:
            raise RuntimeError(FAULT)
        backend = super().load(path, *rest)
        return Fragile(backend, self) if path.parent.parent.name == FRAGILE else backend


def make_clock_jump() -> None:
    """Let the wall clock jump, by replacing the functions that read it."""
    real = time.time_ns

    def time_ns() -> int:
        return real() + next(DAYS) * DAY_S * 1_000_000_000

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9


def ready(told: StartupReport) -> None:
    sys.stdout.write(f"{told.grpc_port}\n")
    sys.stdout.flush()


def main(path: str, access_log: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    make_clock_jump()
    options = ServerOptions(
        path=Path(path),
        grpc_port=0,
        placement=DevicePlacement(use_gpu=False, threads=1),
        control=ControlOptions(mode=ControlMode.EXPLICIT, load_at_start=(ALL,), warm_up_budget_s=0.2),
        shared_memory=True,
        observe=ObserveOptions(access_log=AccessLog.ALL, access_log_file=Path(access_log)),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options, FragileRuntime(), ready))
    leave_threads_behind()


if __name__ == "__main__":
    main(*sys.argv[1:])
