"""A model that copies, which is what emulated kernels cannot get wrong, and what the emulated device says of it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntimeBackend
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.tensors import Array
from tests.serve.backends.support import load_backend

COLUMNS = 4


def log(device: ctypes.CDLL) -> list[str]:
    """What has been done since this was asked for last."""
    text: bytes = device.emulated_log()
    return text.decode().splitlines()


def save(path: Path, *, sized: bool = False) -> Path:
    """A model that copies rows of COLUMNS; with `sized`, whatever comes, in the shape that its second input says."""
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["n"] if sized else ["n", COLUMNS])]
    inputs += [value("s", TensorProto.INT64, [2])] if sized else []
    nodes = [helper.make_node("Reshape", ["x", "s"], ["t"]), helper.make_node("Identity", ["t"], ["y"])]
    kept = [] if sized else [helper.make_tensor("s", TensorProto.INT64, [3], [-1, 2, COLUMNS // 2])]
    outputs = [value("y", TensorProto.FLOAT, ["a", "b"] if sized else ["n", 2, COLUMNS // 2])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, kept)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def with_graphs(**parameters: str) -> ModelConfig:
    config = ModelConfig()
    config.optimization.cuda.graphs = True
    for key, text in parameters.items():
        config.parameters[key].string_value = text
    return config


def load(path: Path, config: ModelConfig | None = None, *, sized: bool = False) -> OnnxRuntimeBackend:
    return load_backend(save(path, sized=sized), DevicePlacement(), config)


def rows(count: int, start: int = 0) -> dict[str, Array]:
    return {"x": np.arange(start, start + count * COLUMNS, dtype=np.float32).reshape(count, COLUMNS)}


def check(backend: OnnxRuntimeBackend, count: int, start: int = 0) -> None:
    answer = backend.run(rows(count, start))["y"]
    assert answer.ravel().tolist() == list(range(start, start + count * COLUMNS))
