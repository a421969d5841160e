"""Small ONNX models written by hand, as files (whole, with data files, damaged) and in sessions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from halfserve.export.onnx_files.model_file import serialize


def sums(
    count: int = 4, size: int | tuple[int, ...] = 512, *, dtype: type[np.generic] = np.float32, opset: int = 20
) -> onnx.ModelProto:
    """x [*size] -> y = x + w0 + w1 + ...: `count` weights of that size, all different; then one scalar factor."""
    shape = [size] if isinstance(size, int) else list(size)
    values = np.random.default_rng(0).normal(size=size).astype(np.float32)
    weights = [numpy_helper.from_array((values / (i + 1)).astype(dtype), f"w{i}") for i in range(count)]
    names = ["x", *(f"a{i}" for i in range(count))]
    nodes = [helper.make_node("Add", [names[i], f"w{i}"], [names[i + 1]], name=f"add{i}") for i in range(count)]
    nodes.append(helper.make_node("Mul", [names[-1], "factor"], ["y"], name="scale"))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "sums",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, shape)],
        [*weights, numpy_helper.from_array(np.array(0.5, dtype), "factor")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, producer_name="tests")


def with_a_body(size: int = 512) -> onnx.ModelProto:
    """An If whose branches hold an initializer, and a Constant node, each of `size` elements."""
    weight = numpy_helper.from_array(np.arange(size, dtype=np.float32), "inner")
    value = helper.make_tensor_value_info("out", TensorProto.FLOAT, [size])
    then = helper.make_graph(
        [helper.make_node("Add", ["x", "inner"], ["out"], name="inner_add")], "then", [], [value], [weight]
    )
    other = helper.make_graph([helper.make_node("Identity", ["k"], ["out"], name="other")], "else", [], [value])
    constant = numpy_helper.from_array(np.ones(size, np.float32), "value")
    nodes = [
        helper.make_node("Constant", [], ["k"], name="constant", value=constant),
        helper.make_node("If", ["flag"], ["y"], name="if", then_branch=then, else_branch=other),
    ]
    graph = helper.make_graph(
        nodes,
        "with_a_body",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [size]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [size])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def in_one_file(model: onnx.ModelProto, path: Path) -> Path:
    """Write the model in one piece."""
    path.write_bytes(serialize(model))
    return path


def with_data_files(model: onnx.ModelProto, path: Path, *, files: int = 1) -> Path:
    """Write the model with its weights dealt out to `files` data files beside it, as onnx itself does."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    large = [tensor for tensor in copied.graph.initializer if len(tensor.raw_data) >= 1024]
    for index, tensor in enumerate(large):
        onnx.external_data_helper.set_external_data(tensor, f"{path.stem}.{index * files // len(large)}.bin")
    onnx.save_model(copied, path)
    return path


def chain(operations: list[str], constant: float, *, batch: int | str = "batch") -> onnx.ModelProto:
    """x FP16 [batch, 1] -> y: one node after the other, each with the constant as its second operand."""
    names = ["x", *(f"v{index}" for index in range(len(operations) - 1)), "y"]
    nodes = [
        helper.make_node(operation, [names[index], "c"], [names[index + 1]], name=f"{operation}_{index}")
        for index, operation in enumerate(operations)
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [batch, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [batch, 1])],
        [numpy_helper.from_array(np.array([constant], np.float16), "c")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def open_session(content: bytes, level: str) -> Any:
    """An `onnxruntime.InferenceSession`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run_session(session: Any, feeds: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Run once; outputs by name."""
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, dict(feeds)), strict=True))
