"""A float16 model with a float32 island, and operators that a GPU has no kernels for."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def half_model() -> onnx.ModelProto:
    """x [2, 8] float16 -> MatMul, Tan, (Exp, Sqrt in float32), Reshape, GridSample -> y."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="matmul"),
        helper.make_node("Tan", ["a"], ["b"], name="tan"),
        helper.make_node("Cast", ["b"], ["c"], name="up", to=TensorProto.FLOAT),
        helper.make_node("Exp", ["c"], ["d"], name="exp"),
        helper.make_node("Sqrt", ["d"], ["e"], name="sqrt"),
        helper.make_node("Cast", ["e"], ["f"], name="down", to=TensorProto.FLOAT16),
        helper.make_node("Reshape", ["f", "grid"], ["g"], name="reshape"),
        helper.make_node("GridSample", ["image", "g"], ["y"], name="grid_sample"),
    ]
    graph = helper.make_graph(
        nodes,
        "half",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, [2, 8]),
            helper.make_tensor_value_info("image", TensorProto.FLOAT16, [1, 1, 4, 4]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [1, 1, 4, 2])],
        [numpy_helper.from_array(np.ones((8, 8), np.float16), "w"), numpy_helper.from_array(np.array([1, 4, 2, 2]), "grid")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def one_node(op_type: str, opset: int, dtype: int = TensorProto.FLOAT16, domain: str = "") -> onnx.ModelProto:
    """y = op(x), x of the given type and any shape."""
    values = [helper.make_tensor_value_info(name, dtype, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], domain=domain)], "one", values[:1], values[1:])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
