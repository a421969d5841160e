"""Load a model as the engine does: describe it, then load it."""

from __future__ import annotations

from pathlib import Path

from serve.backends.onnxruntime_backend import OnnxRuntime, OnnxRuntimeBackend
from serve.engine.backend import Placement


def load_backend(path: Path, placement: Placement) -> OnnxRuntimeBackend:
    runtime = OnnxRuntime()
    return runtime.load(path, runtime.describe(path), placement)
