"""ONNX models that tests serve: small, made from a seed, with every shape and dtype in plain sight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from halfserve.protos.datatypes import DATATYPES

# Options of a server whose log is compared. Of a half model without a verdict, the log says on some processors that bfloat16
# would be faster.
FLOAT32 = ("--cpu-precision", "float32")

OPSET, IR_VERSION = 20, 9
Array: TypeAlias = np.ndarray[Any, Any]


def save_model(
    path: Path,
    nodes: list[NodeProto],
    inputs: list[tuple[str, int, list[int | str]]],
    outputs: list[tuple[str, int, list[int | str]]],
    weights: dict[str, Array] | None = None,
) -> Path:
    """Check and write a model; tensors are (name, TensorProto type, shape)."""
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
    )
    return _save_graph(path, graph, weights or {})


def nodes_of(text: str) -> list[NodeProto]:
    """The nodes of ONNX's text form, such as "h = MatMul(x, w) y = Relu(h)"."""
    return list(onnx.parser.parse_graph(f"g () => () {{ {text} }}").node)


def save_text(path: Path, text: str, **weights: ArrayLike) -> Path:
    """Check and write a model in ONNX's text form: "(float[n, 4] x) => (float[n, 4] y) { y = Mul(x, w) }", w=np.float32(2)."""
    return _save_graph(path, onnx.parser.parse_graph(f"{path.stem} {text}"), weights)


def _save_graph(path: Path, graph: GraphProto, weights: Mapping[str, ArrayLike]) -> Path:
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def mlp_weights() -> tuple[Array, Array]:
    """The two matrices of the "mlp" model, fp16, shapes (64, 32) and (32, 10)."""
    random = np.random.default_rng(0)
    first = (random.standard_normal((64, 32)) / 8).astype(np.float16)
    second = (random.standard_normal((32, 10)) / 6).astype(np.float16)
    return first, second


def save_mlp(path: Path) -> Path:
    """x FP16 [batch, 64] -> y FP16 [batch, 10]: two products with a ReLU between them."""
    first, second = mlp_weights()
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "w2"], ["y"]),
    ]
    fp16 = TensorProto.FLOAT16
    return save_model(path, nodes, [("x", fp16, ["batch", 64])], [("y", fp16, ["batch", 10])], {"w1": first, "w2": second})


def save_echo_types(path: Path) -> Path:
    """One input `in_FP16`, ... and one equal output `out_FP16`, ... [batch, any] per datatype that numpy has."""
    types = [(row.wire, row.onnx) for row in DATATYPES if row.numpy is not None]
    nodes = [helper.make_node("Identity", [f"in_{wire}"], [f"out_{wire}"]) for wire, _ in types]
    inputs = [(f"in_{wire}", number, ["batch", f"n_{wire}"]) for wire, number in types]
    outputs = [(f"out_{wire}", number, ["batch", f"n_{wire}"]) for wire, number in types]
    return save_model(path, nodes, inputs, outputs)  # type: ignore[arg-type]  # a list of str is a list of int | str here


def save_picky(path: Path) -> Path:
    """i INT64 [batch, 1] -> y: Gather of two rows at i + 0, so an index above 1 fails inside the runtime.

    The server does not see the index's range, as it is computed: such an error is not known to be the client's.
    """
    nodes = [
        helper.make_node("Add", ["i", "zero"], ["index"]),
        helper.make_node("Gather", ["table", "index"], ["g"], axis=0),
        helper.make_node("Identity", ["g"], ["y"]),
    ]
    table = np.array([10.0, 20.0], np.float32)
    inputs: list[tuple[str, int, list[int | str]]] = [("i", TensorProto.INT64, ["batch", 1])]
    weights: dict[str, Array] = {"table": table, "zero": np.array(0, np.int64)}
    return save_model(path, nodes, inputs, [("y", TensorProto.FLOAT, ["batch", 1])], weights)


def save_unbatched(path: Path) -> Path:
    """x FP32 [3] -> y FP32 [3], no batch dimension: y = x + x."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    return save_model(path, nodes, [("x", TensorProto.FLOAT, [3])], [("y", TensorProto.FLOAT, [3])])


def save_table(path: Path, dtype: type[np.float16 | np.float32]) -> Path:
    """i INT64 [batch, 1] -> y [batch, 1] in `dtype`: half of table[i], of 10 and 98,304; fp16 has only the first of these.

    The half of either is within fp16's range, so an fp32 twin's answer can be given where the fp16 model's is infinite.
    """
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["g"], axis=0),
        helper.make_node("Mul", ["g", "half"], ["y"]),
    ]
    with np.errstate(over="ignore"):
        weights = {"table": np.array([10.0, 98_304.0]).astype(dtype), "half": np.array(0.5, dtype)}
    number = TensorProto.FLOAT16 if dtype is np.float16 else TensorProto.FLOAT
    return save_model(path, nodes, [("i", TensorProto.INT64, ["batch", 1])], [("y", number, ["batch", 1])], weights)


def save_thousandfold(path: Path, dtype: type[np.float16 | np.float32]) -> Path:
    """x [batch, 4] -> y [batch, 4], both in `dtype`: y = 1000 x, which fp16 has up to x = 65."""
    number = TensorProto.FLOAT16 if dtype is np.float16 else TensorProto.FLOAT
    nodes = [helper.make_node("Mul", ["x", "thousand"], ["y"])]
    weights = {"thousand": np.array(1000, dtype)}
    return save_model(path, nodes, [("x", number, ["batch", 4])], [("y", number, ["batch", 4])], weights)


def save_counter(path: Path) -> Path:
    """n INT64 [1] -> y INT64 [1], no batch dimension: counts to n in a loop, about a microsecond a step."""
    number = TensorProto.INT64
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Add", ["count", "one"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", number, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("count", number, [1]),
        ],
        [helper.make_tensor_value_info("go_on", TensorProto.BOOL, []), helper.make_tensor_value_info("next", number, [1])],
    )
    nodes = [helper.make_node("Squeeze", ["n"], ["times"]), helper.make_node("Loop", ["times", "", "zero"], ["y"], body=body)]
    weights = {"one": np.array([1], np.int64), "zero": np.array([0], np.int64)}
    return save_model(path, nodes, [("n", number, [1])], [("y", number, [1])], weights)
