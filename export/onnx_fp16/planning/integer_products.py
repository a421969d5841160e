"""Sums of integer products, as quantized models make them: far beyond float16's range until they are scaled down."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes, constant_of, is_float
from export.onnx_fp16.planning.op_sets import ELEMENTWISE, MOVERS

SCALING_REASON = "scales a sum of integer products, which float16 does not hold"
ADDEND_REASON = "becomes an addend of a sum of integer products: float16 holds whole numbers up to 2048 only"

_PRODUCTS = frozenset({"ConvInteger", "MatMulInteger"})
_SUMS = frozenset({"Add", "Cast", "Sub", "Sum"}) | MOVERS
_SCALES = frozenset({"Div", "Mul"})


def scaling_nodes(model: onnx_ir.Model) -> set[onnx_ir.Node]:
    """Float nodes between an integer product and its scaling, that included, and those that compute the scale."""
    found: set[onnx_ir.Node] = set()
    for node in _sums(model):
        if is_float(node.outputs[0]):
            found.add(node)
            if node.op_type in _SCALES:
                found |= _scale_makers(node)
    return found


def addend_nodes(model: onnx_ir.Model) -> set[onnx_ir.Node]:
    """Float nodes that compute, place by place, what is turned into integers and added to an integer product: biases."""
    seen: set[onnx_ir.Node] = set()
    stack = [value for node in _sums(model) if not is_float(node.outputs[0]) for value in node.inputs]
    while stack:
        value = stack.pop()
        maker = value.producer() if value is not None else None
        if maker is None or maker in seen or maker.domain or maker.op_type not in MOVERS | ELEMENTWISE:
            continue
        seen.add(maker)
        stack += maker.inputs
    return {node for node in seen if is_float(node.outputs[0])}


def _sums(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    """The nodes that an integer product goes through, up to where it is scaled, that included."""
    stack = [value for node in all_nodes(model) if node.op_type in _PRODUCTS and not node.domain for value in node.outputs]
    seen: set[onnx_ir.Node] = set()
    while stack:
        for node in stack.pop().consumers():
            if node in seen or node.domain or node.op_type not in _SUMS | _SCALES:
                continue
            seen.add(node)
            yield node
            if node.op_type not in _SCALES or not is_float(node.outputs[0]):
                stack += node.outputs


def _scale_makers(node: onnx_ir.Node) -> set[onnx_ir.Node]:
    """The nodes that compute a scale from the scales of both factors: their product can vanish in float16."""
    makers = (value.producer() for value in node.inputs if value is not None)
    return {maker for maker in makers if maker is not None and maker.op_type in _SCALES and _is_scale(maker)}


def _is_scale(node: onnx_ir.Node) -> bool:
    def known(value: onnx_ir.Value | None) -> bool:
        maker = value.producer() if value is not None else None
        return constant_of(value) is not None or (maker is not None and maker.op_type == "DynamicQuantizeLinear")

    return all(known(value) for value in node.inputs)
