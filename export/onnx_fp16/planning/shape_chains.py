"""Float arithmetic that ends in a shape: rounding it would give tensors of another size."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir

from export.onnx_fp16.element_types.control_flow import slots_of
from export.onnx_fp16.graph_walk import all_nodes, is_float
from export.onnx_fp16.planning.op_sets import DATA_ENDS, ELEMENTWISE, MOVERS, REDUCTIONS, SHAPE_INPUTS

REASON = "shape arithmetic"
_SIMPLE = ELEMENTWISE | MOVERS | REDUCTIONS | {"ConstantOfShape", "Constant"}


def shape_chains(model: onnx_ir.Model) -> tuple[set[onnx_ir.Node], set[onnx_ir.Value]]:
    """What shapes, sizes and positions are computed from, back to where data comes in.

    Returns:
        The float nodes, and the float results of nodes with bodies through which they pass.
    """
    found: set[onnx_ir.Node] = set()
    passed: set[onnx_ir.Value] = set()
    seen: set[onnx_ir.Value] = set()
    stack = [value for node in all_nodes(model) for value in _shape_inputs(node)]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            continue
        through = [leaving for slot in slots_of(node) if value in slot.results for leaving in (*slot.leaving, *slot.entering)]
        if through:
            passed.add(value)
            stack += through
        elif _leads_on(node, value):
            if is_float(value) or any(is_float(source) for source in node.inputs):
                found.add(node)
            stack += [source for source in node.inputs if source is not None]
    return found, {value for value in passed if is_float(value)}


def _shape_inputs(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    if node.domain:
        return
    for index in SHAPE_INPUTS.get(node.op_type, ()):
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None:
            yield value


def _leads_on(node: onnx_ir.Node, value: onnx_ir.Value) -> bool:
    if node.domain or node.op_type in DATA_ENDS:
        return False
    if node.op_type in _SIMPLE or node.op_type == "Range":
        return True
    return not is_float(value) and not any(is_float(source) for source in node.inputs)
