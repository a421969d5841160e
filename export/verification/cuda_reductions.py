"""Reductions whose CUDA kernels round to float16 inside, as the single operations that those kernels consist of.

ONNX Runtime's `ReduceKernel` (core/providers/cuda/reduction/reduction_ops.cc) sums in float32, but writes what it sums and what
it takes the logarithm of to buffers of the tensor's own type:

- ReduceSumSquare squares into a float16 buffer, so that 300 overflows although a mean of squares might not be asked for;
- ReduceLogSum rounds its sum before the logarithm: a sum of 70000 has no logarithm there;
- ReduceLogSumExp does so too, after the largest value was subtracted and the exponentials were rounded.

ReduceL2, ReduceMean, ReduceSum and ReduceL1 are one cuDNN call with float32 inside.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

AXES_ARE_INPUT_FROM = {"ReduceSum": 13, "ReduceMax": 18}


def taken_apart(node: onnx.NodeProto, opset: int, numbers: Iterator[int]) -> list[onnx.NodeProto]:
    """The node, or for a reduction that rounds inside, the nodes it consists of.

    Args:
        node: Any node that computes in float16.
        opset: The version of ONNX's own operators.
        numbers: Gives each reduction a number of its own, for the names of its inner values.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"):
        return [node]
    if _does_nothing(node):
        return [node]
    parts = _Parts(node, opset, f"{node.output[0]}/inside_{next(numbers)}")
    return {"ReduceSumSquare": _square_sum, "ReduceLogSum": _log_sum, "ReduceLogSumExp": _log_sum_exp}[node.op_type](parts)


def _does_nothing(node: onnx.NodeProto) -> bool:
    return any(attribute.name == "noop_with_empty_axes" and attribute.i for attribute in node.attribute)


class _Parts:
    """Makes the operations of one reduction."""

    def __init__(self, node: onnx.NodeProto, opset: int, prefix: str) -> None:
        self._node = node
        self._opset = opset
        self._prefix = prefix
        self._made = 0
        self.x: str = node.input[0]
        self.y: str = node.output[0]
        self.constants: list[onnx.NodeProto] = []

    def name(self, suffix: str) -> str:
        return f"{self._prefix}/{suffix}"

    def make(self, operation: str, inputs: list[str], output: str) -> onnx.NodeProto:
        return self._marked(helper.make_node(operation, inputs, [output]))

    def reduce(self, operation: str, x: str, output: str, *, keepdims: bool | None = None) -> onnx.NodeProto:
        """A reduction of x over the node's axes, which are an attribute or an input, as the opset has it."""
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in self._node.attribute}
        attributes = {name: value for name, value in attributes.items() if name in ("axes", "keepdims")}
        if keepdims is not None:
            attributes["keepdims"] = int(keepdims)
        inputs = [x, *self._node.input[1:]]
        if self._opset >= AXES_ARE_INPUT_FROM[operation] and (axes := attributes.pop("axes", None)) is not None:
            inputs.append(self._constant(list(axes)))
        return self._marked(helper.make_node(operation, inputs, [output], **attributes))

    def _marked(self, node: onnx.NodeProto) -> onnx.NodeProto:
        self._made += 1
        node.name = f"{self._node.name or self.y}/{node.op_type}_{self._made}"
        node.metadata_props.extend(self._node.metadata_props)
        return node

    def _constant(self, axes: list[int]) -> str:
        name = self.name(f"axes_{len(self.constants)}")
        value = helper.make_tensor(name, onnx.TensorProto.INT64, [len(axes)], axes)
        self.constants.append(helper.make_node("Constant", [], [name], value=value))
        return name


def _square_sum(parts: _Parts) -> list[onnx.NodeProto]:
    square = parts.name("square")
    nodes = [parts.make("Mul", [parts.x, parts.x], square), parts.reduce("ReduceSum", square, parts.y)]
    return [*parts.constants, *nodes]


def _log_sum(parts: _Parts) -> list[onnx.NodeProto]:
    total = parts.name("sum")
    nodes = [parts.reduce("ReduceSum", parts.x, total), parts.make("Log", [total], parts.y)]
    return [*parts.constants, *nodes]


def _log_sum_exp(parts: _Parts) -> list[onnx.NodeProto]:
    names = {name: parts.name(name) for name in ("largest", "shifted", "exp", "sum", "log", "largest_again")}
    nodes = [
        parts.reduce("ReduceMax", parts.x, names["largest"], keepdims=True),
        parts.make("Sub", [parts.x, names["largest"]], names["shifted"]),
        parts.make("Exp", [names["shifted"]], names["exp"]),
        parts.reduce("ReduceSum", names["exp"], names["sum"]),
        parts.make("Log", [names["sum"]], names["log"]),
        parts.reduce("ReduceMax", parts.x, names["largest_again"]),
        parts.make("Add", [names["log"], names["largest_again"]], parts.y),
    ]
    return [*parts.constants, *nodes]
