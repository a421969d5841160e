"""CumSum as ONNX Runtime's CUDA kernel computes it: one addition after the other, each rounded to float16.

That kernel (core/providers/cuda/math/cumsum_impl.cu) adds in the tensor's own type: 4096 ones add up to 2048, beside which
float16 has no odd numbers. It is written here as a Scan, whose body a runtime cannot merge across turns. Backwards the kernel
begins each sum at its own place and the Scan at the end of the axis: as many roundings, in another order.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper, numpy_helper

ENDLESS = 2**63 - 1  # what Slice takes for "to the end"


def constants_in(graph: onnx.GraphProto) -> dict[str, int]:
    """The whole numbers that a graph's initializers and Constant nodes hold, by name; only those of a single element."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, int] = {}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                tensors[node.output[0]] = attribute.t
            elif attribute.name == "value_int":
                found[node.output[0]] = attribute.i
    for name, tensor in tensors.items():
        if tensor.data_type in (TensorProto.INT32, TensorProto.INT64) and list(tensor.dims) in ([], [1]):
            found[name] = int(numpy_helper.to_array(tensor).reshape(()))
    return found


def is_running_sum(node: onnx.NodeProto, constants: Mapping[str, int]) -> bool:
    """Whether a node is a CumSum over an axis that is known; over any other axis it stays one node."""
    return node.op_type == "CumSum" and node.domain in ("", "ai.onnx") and node.input[1] in constants


def running_sum(node: onnx.NodeProto, constants: Mapping[str, int]) -> list[onnx.NodeProto]:
    """The nodes that a float16 CumSum consists of; its result keeps its name.

    Args:
        node: The CumSum, of opset 14 or later, since when it takes float16.
        constants: Whole numbers by name, its axis among them.
    """
    x, y, axis = node.input[0], node.output[0], constants[node.input[1]]
    flags = {attribute.name: bool(attribute.i) for attribute in node.attribute}
    exclusive, backwards = flags.get("exclusive", False), flags.get("reverse", False)
    part = f"{y}/running"
    zero = helper.make_tensor("value", TensorProto.FLOAT16, [1], [0.0])
    scan = helper.make_node(
        "Scan",
        [f"{part}/start", f"{part}/longer"],
        [f"{part}/end", f"{part}/sums"],
        name=node.name,
        body=_turn(part),
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[int(backwards)],
        scan_output_axes=[axis],
        scan_output_directions=[int(backwards)],
    )
    scan.metadata_props.extend(node.metadata_props)
    # A zero goes first, so that there is one more sum than there are entries, and never none: that kills ONNX Runtime.
    longer = [x, f"{part}/zeros"] if backwards else [f"{part}/zeros", x]
    first, last = (1, ENDLESS) if exclusive == backwards else (0, -1)
    return [
        *(_whole(f"{part}/{name}", number) for name, number in (("axes", axis), ("first", first), ("last", last))),
        helper.make_node("ReduceSum", [x, f"{part}/axes"], [f"{part}/one"], keepdims=1),  # for its shape alone
        helper.make_node("Shape", [f"{part}/one"], [f"{part}/shape"]),
        helper.make_node("ConstantOfShape", [f"{part}/shape"], [f"{part}/zeros"], value=zero),
        helper.make_node("Squeeze", [f"{part}/zeros", f"{part}/axes"], [f"{part}/start"]),
        helper.make_node("Concat", longer, [f"{part}/longer"], axis=axis),
        scan,
        helper.make_node("Slice", [f"{part}/{name}" for name in ("sums", "first", "last", "axes")], [y]),
    ]


def _whole(name: str, number: int) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor("value", TensorProto.INT64, [1], [number]))


def _turn(part: str) -> onnx.GraphProto:
    """One addition, in float32 and rounded to float16."""
    total, entry, wide, more, added, after, seen = (
        f"{part}/{name}" for name in ("total", "entry", "wide", "more", "added", "after", "seen")
    )
    nodes = [
        helper.make_node("Cast", [total], [wide], to=TensorProto.FLOAT),
        helper.make_node("Cast", [entry], [more], to=TensorProto.FLOAT),
        helper.make_node("Add", [wide, more], [added]),
        helper.make_node("Cast", [added], [after], to=TensorProto.FLOAT16),
        helper.make_node("Identity", [after], [seen]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in (total, entry, after, seen)]
    return helper.make_graph(nodes, "running_sum", values[:2], values[2:])
