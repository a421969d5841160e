"""Model folders for tests, and what is loaded from them."""

from __future__ import annotations

from pathlib import Path

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from tests.models import save_mlp


def write_versions(root: Path, *versions: str, name: str = "mlp", config: str | None = None) -> Path:
    for version in versions:
        save_mlp(root / name / version / "model.onnx")
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    return root


def found(root: Path) -> list[tuple[str, int]]:
    return [(files.name, files.version) for files in find_models(root)]


def load(path: Path) -> Model:
    (files,) = find_models(path)
    return load_model(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
