"""A server as a process of its own, with options as JSON: python -m tests.serve.model_control.server_program PATH OPTIONS

`"hang": true` makes the model never answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.model_control.control_options import ControlOptions
from halfserve.serve.server import ServerOptions, serve
from halfserve.serve.startup_report import StartupReport


class Hanging:
    """A backend that takes everything and gives nothing."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, inputs: Tensors) -> Tensors:
        sys.stdout.write("running\n")
        sys.stdout.flush()
        threading.Event().wait()
        return inputs


class HangingRuntime(OnnxRuntime):
    def load(self, *arguments: Any) -> Any:
        return Hanging(super().load(*arguments))


def ready(told: StartupReport) -> None:
    sys.stdout.write(f"{told.grpc_port}\n")
    sys.stdout.flush()


def main(path: str, text: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    given = json.loads(text)
    runtime = HangingRuntime() if given.pop("hang", False) else OnnxRuntime()
    drain_s = given.pop("drain_s", 30.0)
    options = ServerOptions(
        path=Path(path),
        grpc_port=0,
        placement=DevicePlacement(use_gpu=False, threads=1),
        control=ControlOptions(**given),
        drain_s=drain_s,
    )
    asyncio.run(serve(options, runtime, ready))


if __name__ == "__main__":
    main(*sys.argv[1:])
