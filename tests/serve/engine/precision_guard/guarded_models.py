"""Guarded models, loaded as the server loads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serve.backends.onnx_runtime.backend import OnnxRuntime
from serve.engine.backend import Placement
from serve.engine.configuration.config import Defaults
from serve.engine.model import Model
from serve.engine.repository.loaded_version import load_model
from serve.engine.repository.model_repository import find_models
from tests.models import save_table, save_thousandfold

TWIN = Path("1/fp32/model.onnx")


def config_text(**parameters: str) -> str:
    """A config.pbtxt with these halfserve.* parameters, and batches."""
    entries = [
        f'parameters {{ key: "halfserve.{name}" value {{ string_value: "{value}" }} }}' for name, value in parameters.items()
    ]
    return "\n".join(["max_batch_size: 8", *entries])


def write_table(folder: Path, *, twin: bool = True, **parameters: str) -> Path:
    """The table model in fp16, of which row 1 is infinite; with its fp32 twin it answers 49,152 there."""
    save_table(folder / "1" / "model.onnx", np.float16)
    if twin:
        save_table(folder / TWIN, np.float32)
    (folder / "config.pbtxt").write_text(config_text(**parameters))
    return folder


def write_thousandfold(folder: Path, **parameters: str) -> Path:
    """The model that multiplies by 1000 in fp16, and its fp32 twin."""
    save_thousandfold(folder / "1" / "model.onnx", np.float16)
    save_thousandfold(folder / TWIN, np.float32)
    (folder / "config.pbtxt").write_text(config_text(**parameters))
    return folder


def load(repository: Path) -> list[Model]:
    """Every model of a repository, on one CPU thread."""
    placement = Placement(use_gpu=False, threads=1)
    return [load_model(files, OnnxRuntime(), placement, Defaults()) for files in find_models(repository)]
