"""Models for timing conversions: one of 20 MB, a deep one of small weights, a convolutional one, a long chain of nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array: TypeAlias = np.ndarray[Any, Any]
OPSET, IR = 17, 8


def encoder(layers: int = 13, width: int = 256) -> onnx.ModelProto:
    """Blocks of LayerNormalization, two MatMuls with a bias and a GELU in parts, and a shortcut: 1.6 MB of weights each."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Array] = {"half": _scalar(0.5), "one": _scalar(1)}
    weights["root"] = _scalar(2**0.5)
    value = "x"
    for i in range(layers):
        weights |= {f"{i}.gain": np.ones(width, np.float32), f"{i}.shift": np.zeros(width, np.float32)}
        weights[f"{i}.up"] = (rng.standard_normal((width, 3 * width)) / width**0.5).astype(np.float32)
        weights[f"{i}.bias"] = np.zeros(3 * width, np.float32)
        weights[f"{i}.down"] = (rng.standard_normal((3 * width, width)) / width**0.5).astype(np.float32)
        for op, inputs, output in (
            ("LayerNormalization", [value, f"{i}.gain", f"{i}.shift"], f"{i}.norm"),
            ("MatMul", [f"{i}.norm", f"{i}.up"], f"{i}.wide"),
            ("Add", [f"{i}.wide", f"{i}.bias"], f"{i}.biased"),
            ("Div", [f"{i}.biased", "root"], f"{i}.scaled"),
            ("Erf", [f"{i}.scaled"], f"{i}.erf"),
            ("Add", [f"{i}.erf", "one"], f"{i}.cdf"),
            ("Mul", [f"{i}.biased", f"{i}.cdf"], f"{i}.product"),
            ("Mul", [f"{i}.product", "half"], f"{i}.gelu"),
            ("MatMul", [f"{i}.gelu", f"{i}.down"], f"{i}.narrow"),
            ("Add", [value, f"{i}.narrow"], f"{i}.out"),
        ):
            nodes.append(helper.make_node(op, inputs, [output], name=f"{i}/{op}_{output}"))
        value = f"{i}.out"
    return _model(nodes, weights, value, ["batch", width])


def convolutions(blocks: int = 16, channels: int = 96) -> onnx.ModelProto:
    """Blocks of a 3x3 Conv, BatchNormalization and Relu with a shortcut: 5 MB."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Array] = {}
    value = "x"
    for i in range(blocks):
        weights[f"{i}.w"] = (rng.standard_normal((channels, channels, 3, 3)) / (9 * channels) ** 0.5).astype(np.float32)
        statistics = {"scale": 1.0, "b": 0.0, "mean": 0.1, "var": 1.0}
        weights |= {f"{i}.{name}": np.full(channels, number, np.float32) for name, number in statistics.items()}
        normalized = [f"{i}.conv", *(f"{i}.{name}" for name in statistics)]
        nodes += [
            helper.make_node("Conv", [value, f"{i}.w"], [f"{i}.conv"], name=f"{i}/Conv", pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", normalized, [f"{i}.norm"], name=f"{i}/BatchNormalization"),
            helper.make_node("Relu", [f"{i}.norm"], [f"{i}.relu"], name=f"{i}/Relu"),
            helper.make_node("Add", [value, f"{i}.relu"], [f"{i}.out"], name=f"{i}/Add"),
        ]
        value = f"{i}.out"
    return _model(nodes, weights, value, ["batch", channels, 16, 16])


def chain(length: int = 2000) -> onnx.ModelProto:
    """`length` nodes in sequence, almost without weights."""
    operators = ("Add", "Mul", "Relu", "Tanh")
    nodes = []
    for i in range(length):
        op = operators[i % len(operators)]
        inputs = [f"v{i}" if i else "x", *(["c"] if op in {"Add", "Mul"} else [])]
        nodes.append(helper.make_node(op, inputs, [f"v{i + 1}"], name=f"{op}_{i}"))
    return _model(nodes, {"c": _scalar(0.5)}, f"v{length}", ["batch", 16])


def wide(layers: int = 3, width: int = 2048) -> onnx.ModelProto:
    """Few nodes with large weights: 50 MB."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": (rng.standard_normal((width, width)) / width**0.5).astype(np.float32) for i in range(layers)}
    nodes = [
        helper.make_node("MatMul", [f"v{i}" if i else "x", f"w{i}"], [f"v{i + 1}"], name=f"MatMul_{i}") for i in range(layers)
    ]
    return _model(nodes, weights, f"v{layers}", ["batch", width])


SPEED_MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "encoder, 20 MB, 130 nodes": encoder,
    "convolutions, 5 MB, 64 nodes": convolutions,
    "chain, 2,000 nodes": chain,
    "wide, 50 MB, 3 nodes": wide,
}


def _model(nodes: list[onnx.NodeProto], weights: dict[str, Array], output: str, shape: list[str | int]) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", output))
    graph = helper.make_graph(nodes, "timed", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)


def _scalar(number: float) -> Array:
    return np.array(number, np.float32)
