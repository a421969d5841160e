"""Load a model as the engine does: describe it, then load it."""

from __future__ import annotations

from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime.backend import OnnxRuntime, OnnxRuntimeBackend
from serve.backends.onnx_runtime.session import OpenSession, SessionOpener
from serve.engine.backend import DevicePlacement


def load_backend(path: Path, placement: DevicePlacement, config: ModelConfig | None = None) -> OnnxRuntimeBackend:
    runtime = OnnxRuntime()
    return runtime.load(path, runtime.describe(path), placement, config or ModelConfig())


def open_session(path: Path, placement: DevicePlacement) -> OpenSession:
    return SessionOpener(path=path, placement=placement).open()
