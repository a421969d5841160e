"""A real server in this process whose models come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime, OnnxRuntimeBackend
from halfserve.serve.engine.backend import DevicePlacement, ModelInterface, Runtime
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.repository.model_repository import ModelRepository
from halfserve.serve.model_control.control_options import ControlMode, ControlOptions
from halfserve.serve.model_control.model_control import ModelControl
from halfserve.serve.model_control.version_loading import VersionLoader
from halfserve.serve.storage.repository_copy import RepositoryCopy
from halfserve.serve.storage.storage_options import ObjectStorage
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.running_server import WAIT_S, MakeTransport, RunningServer, running_server

Line = tuple[str, str, str, str]


def loader(warm_up_budget_s: float = 5.0, runtime: Runtime | None = None) -> VersionLoader:
    placement = DevicePlacement(use_gpu=False, threads=1)
    return VersionLoader(
        runtime=runtime or OnnxRuntime(), placement=placement, defaults=Defaults(), warm_up_budget_s=warm_up_budget_s
    )


def control(
    core: InferenceCore,
    path: Path | ObjectStorage,
    mode: ControlMode,
    runtime: Runtime | None = None,
    more_paths: tuple[Path, ...] = (),
    **options: Any,
) -> ModelControl:
    chosen = ControlOptions(mode=mode, **options)
    if isinstance(path, Path):
        return ModelControl(core, ModelRepository(path, *more_paths), loader(runtime=runtime), chosen)
    copy = RepositoryCopy(path)
    return ModelControl(core, ModelRepository(copy.path), loader(runtime=runtime), chosen, copy)


class HeldRuntime(OnnxRuntime):
    """Loads models of some names not until `release` is set; `entered` is set when it is to, `ended` when it has."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names
        self.entered, self.release, self.ended = threading.Event(), threading.Event(), threading.Event()

    def load(
        self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig
    ) -> OnnxRuntimeBackend:
        if config.name in self._names:
            self.entered.set()
            assert self.release.wait(WAIT_S)
            self.ended.set()
        return super().load(path, interface, placement, config)


@contextmanager
def controlled_server(
    path: Path | ObjectStorage,
    mode: ControlMode,
    make_transport: MakeTransport = Nghttp2Server,
    *,
    shared_memory: bool = False,
    **options: Any,
) -> Iterator[RunningServer]:
    """A server on `path` that has loaded what it loads at the start."""
    with running_server(list, make_transport, shared_memory=shared_memory) as server:
        controlling = server.call(lambda: control(server.core, path, mode, **options))
        try:
            server.run(controlling.start())
            yield server
        finally:
            server.call(controlling.close)


def lines(server: RunningServer) -> list[Line]:
    """The index: name, version, state, reason."""
    return server.call(lambda: [(s.name, s.version, s.state.value, s.reason) for s in server.core.index()])


def wait_for(server: RunningServer, expected: list[Line]) -> None:
    """Wait until the index is as expected; it is read again whenever something changes."""

    async def reached() -> None:
        while True:
            changed = server.core.changed
            if [(s.name, s.version, s.state.value, s.reason) for s in server.core.index()] == expected:
                return
            await changed.wait()

    server.run(reached())


def ask(client: triton.InferenceServerClient, name: str = "mlp", version: str = "") -> list[float]:
    """The answer to a row of ones."""
    x = triton.InferInput("x", [1, 64], "FP16").set_data_from_numpy(np.ones((1, 64), np.float16))
    answer = client.infer(name, [x], model_version=version).as_numpy("y")
    return [float(value) for value in np.asarray(answer)[0]]
