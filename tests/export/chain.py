"""fp16 ONNX graphs written by hand, where every node counts."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


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
