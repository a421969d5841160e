"""A supervised server whose process loses its device: python -m tests.serve.faults.supervised_program PATH

The model "fragile" loses its device on a negative number, as CUDA does: from then on no model can be loaded in this
process. Everything else is as in `halfserve serve --supervise`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import uvloop

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.fleet.launch.supervision import become_supervisor
from halfserve.serve.fleet.member.handover import LOST_DEVICE_CODE
from halfserve.serve.fleet.member.supervisor_link import SupervisorLink, take_over
from halfserve.serve.process import leave_at_once
from halfserve.serve.server import LostDeviceError, ServerOptions, addresses, serve
from halfserve.serve.startup_report import StartupReport
from tests.serve.faults.server_program import FRAGILE, ready

FAULT = "CUDA failure 700: an illegal memory access was encountered"


class DoomedRuntime(OnnxRuntime):
    """Its process has one device, which is lost for good once it is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False

    def load(self, path: Path, *rest: Any) -> Any:
        if self.is_lost:
            raise RuntimeError(FAULT)
        backend = super().load(path, *rest)
        return Doomed(self, backend) if path.parent.parent.name == FRAGILE else backend


class Doomed:
    """A backend that takes the device along."""

    def __init__(self, runtime: DoomedRuntime, backend: Backend) -> None:
        self._runtime = runtime
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, inputs: Tensors) -> Tensors:
        self._runtime.is_lost |= any(bool((array < 0).any()) for array in inputs.values())
        if self._runtime.is_lost:
            raise RuntimeError(FAULT)
        return self._backend.run(inputs)


def work(options: ServerOptions, inherited: SupervisorLink) -> None:
    def on_ready(told: StartupReport) -> None:
        if not inherited.restarts:
            ready(told)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(options, DoomedRuntime(), on_ready, inherited))
    except LostDeviceError:
        leave_at_once(LOST_DEVICE_CODE)


def main(path: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    options = ServerOptions(path=Path(path), grpc_port=0, placement=DevicePlacement(use_gpu=False, threads=1))
    inherited = take_over(os.environ)
    if inherited is None:
        become_supervisor(addresses(options))
    else:
        work(options, inherited)


if __name__ == "__main__":
    main(*sys.argv[1:])
