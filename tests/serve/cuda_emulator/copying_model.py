"""A model that copies, which is what emulated kernels cannot get wrong, and what the emulated device says of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import onnx

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntimeBackend
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.tensors import Array
from tests.export.stored_models import parse
from tests.serve.backends.support import load_backend

COLUMNS = 4


def log(device: ctypes.CDLL) -> list[str]:
    """What has been done since this was asked for last."""
    text: bytes = device.emulated_log()
    return text.decode().splitlines()


def save(path: Path, *, sized: bool = False) -> Path:
    """A model that copies rows of COLUMNS; with `sized`, whatever comes, in the shape that its second input says."""
    if sized:
        text = "g (float[n] x, int64[2] s) => (float[a, b] y) { t = Reshape(x, s)  y = Identity(t) }"
        onnx.save(parse(text, opset=17, ir=8), path)
    else:
        text = f"g (float[n, {COLUMNS}] x) => (float[n, 2, {COLUMNS // 2}] y) {{ t = Reshape(x, s)  y = Identity(t) }}"
        onnx.save(parse(text, opset=17, ir=8, s=np.array([-1, 2, COLUMNS // 2])), path)
    return path


def with_graphs(**parameters: str) -> ModelConfig:
    config = ModelConfig()
    config.optimization.cuda.graphs = True
    for key, text in parameters.items():
        config.parameters[key].string_value = text
    return config


def with_options(**options: str) -> ModelConfig:
    """A configuration with these options of the CUDA provider."""
    config = ModelConfig()
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="cuda")
    for key, text in options.items():
        accelerator.parameters[key] = text
    return config


def load(path: Path, config: ModelConfig | None = None, *, sized: bool = False) -> OnnxRuntimeBackend:
    return load_backend(save(path, sized=sized), DevicePlacement(), config)


def rows(count: int, start: int = 0) -> dict[str, Array]:
    return {"x": np.arange(start, start + count * COLUMNS, dtype=np.float32).reshape(count, COLUMNS)}


def check(backend: OnnxRuntimeBackend, count: int, start: int = 0) -> None:
    answer = backend.run(rows(count, start))["y"]
    assert answer.ravel().tolist() == list(range(start, start + count * COLUMNS))
