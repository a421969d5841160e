"""Floats that hold exact integers: shapes, positions, counts, indices and sums of quantized products.

float32 holds integers exactly up to 2**24, float16 only up to 2048, bfloat16 up to 256. A rounded shape would give tensors of
another size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import onnx_ir

from halfserve.export.half_types import HalfType
from halfserve.export.onnx_fp16.graph import (
    COMPARISONS,
    DATA_ENDS,
    ELEMENTWISE,
    INDEX_SOURCES,
    LINEAR,
    MOVERS,
    PERIODIC,
    REDUCTIONS,
    ROUNDINGS,
    SHAPE_INPUTS,
    all_nodes,
    constant_of,
    is_float,
    slots_of,
)
from halfserve.export.onnx_fp16.planning.plan import CastingPlan

SHAPE_REASON = "shape arithmetic"
_SIMPLE = ELEMENTWISE | MOVERS | REDUCTIONS | {"ConstantOfShape", "Constant"}
POSITION_REASON = "positions need more digits for their sine or cosine"
COUNT_REASON = "a product of sizes can be over 65504"
_TRACKED = ELEMENTWISE | MOVERS | REDUCTIONS | {"Range"}
_LARGEST_TABLE = 1 << 22
_SHRINKING = frozenset({"Exp", "Log", "Reciprocal", "Sqrt"})
_PRODUCTS = frozenset({"ConvInteger", "MatMulInteger"})
_SUMS = frozenset({"Add", "Cast", "Sub", "Sum"}) | MOVERS
_SCALES = frozenset({"Div", "Mul"})


def index_reason(half: HalfType) -> str:
    return f"index arithmetic: {_whole_numbers(half)}"


def addend_reason(half: HalfType) -> str:
    return f"becomes an addend of a sum of integer products: {_whole_numbers(half)}"


def _whole_numbers(half: HalfType) -> str:
    return f"{half.name} holds whole numbers up to {half.whole_numbers} only"


def keep_exact(plan: CastingPlan) -> None:
    nodes, passed = shape_chains(plan.model)
    for value in passed:
        plan.keep_group(value)
    for node in nodes:
        plan.keep(node, SHAPE_REASON)
    for node, reason in IndexChains(plan.model, plan.half).find().items():
        plan.keep(node, reason)
    for node in scaling_nodes(plan.model):
        plan.keep(node, f"scales a sum of integer products, which {plan.half.name} does not hold")
    for node in addend_nodes(plan.model):
        plan.keep(node, addend_reason(plan.half))


def shape_chains(model: onnx_ir.Model) -> tuple[set[onnx_ir.Node], set[onnx_ir.Value]]:
    """Find the arithmetic from which shapes, sizes and positions are computed, back to the model's data.

    Returns:
        The float nodes, and the float results of nodes with bodies on the way.
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


class IndexChains:
    """Follows numbers that are computed from integers and constants alone.

    A value is *born* when it is computed elementwise from integers. Connected born nodes form a component; it stays float32 as
    a whole when it concerns indices: when its integers are positions or counts, or when a node in it rounds, compares, or casts
    to integers. A mask of zeros and ones is born, but concerns no indices.
    """

    def __init__(self, model: onnx_ir.Model, half: HalfType) -> None:
        self._model, self._half = model, half
        self._born: dict[onnx_ir.Value, onnx_ir.Node] = {}
        self._positions: set[onnx_ir.Value] = set()
        self._indices: set[onnx_ir.Value] = set()
        self._unbounded: set[onnx_ir.Value] = set()
        self._tables: dict[onnx_ir.Value, bool] = {}
        self._parent: dict[onnx_ir.Node, onnx_ir.Node] = {}
        self._marked: set[onnx_ir.Node] = set()
        self.reasons: dict[onnx_ir.Node, str] = {}

    def find(self) -> dict[onnx_ir.Node, str]:
        nodes = [node for node in all_nodes(self._model) if not node.domain]
        for node in nodes:
            self._visit(node)
        members: dict[onnx_ir.Node, list[onnx_ir.Node]] = defaultdict(list)
        for node in self._parent:
            members[self._root(node)].append(node)
        for node in self._marked:
            for member in members[self._root(node)]:
                self.reasons[member] = index_reason(self._half)
        for node in nodes:
            self._visit_reader(node)
        return self.reasons

    def _visit(self, node: onnx_ir.Node) -> None:
        self._follow_integers(node)
        self._follow_products(node)
        sources = [value for value in node.inputs if is_float(value)]
        starts = (node.op_type == "Cast" and _is_integer(node.inputs[0])) or (node.op_type == "Range" and bool(sources))
        if starts or self._goes_on(node, sources):
            self._add(node)
        if self._is_position(node, sources):
            self._positions.update(value for value in node.outputs if is_float(value))

    def _goes_on(self, node: onnx_ir.Node, sources: list[onnx_ir.Value | None]) -> bool:
        born = [value in self._born for value in sources]
        pure = all(is_born or constant_of(value) is not None for is_born, value in zip(born, sources, strict=True))
        return any(born) and pure and node.op_type in _TRACKED | COMPARISONS

    def _add(self, node: onnx_ir.Node) -> None:
        self._parent.setdefault(node, node)
        for value in node.inputs:
            if value is not None and value in self._born:
                self._parent[self._root(self._born[value])] = self._root(node)
        if self._concerns_indices(node):
            self._marked.add(node)
        for value in node.outputs:
            if is_float(value):
                self._born[value] = node
                self._positions.add(value)
                if value.is_graph_output() and value.graph is self._model.graph:
                    self._marked.add(node)

    def _concerns_indices(self, node: onnx_ir.Node) -> bool:
        if node.op_type in ROUNDINGS | COMPARISONS | {"Range"}:
            return True
        if node.op_type == "Cast":
            return _is_integer(node.outputs[0]) or node.inputs[0] in self._indices
        return False

    def _is_position(self, node: onnx_ir.Node, sources: list[onnx_ir.Value | None]) -> bool:
        if node.op_type not in _TRACKED | LINEAR or not sources:
            return False
        known = [value in self._positions or self._is_table(value) for value in sources]
        fixed = [constant_of(value) is not None for value in sources]
        return any(known) and all(a or b for a, b in zip(known, fixed, strict=True))

    def _is_table(self, value: onnx_ir.Value | None) -> bool:
        """Return whether a constant is a table of positions: integers of which the half type lacks some."""
        tensor = constant_of(value)
        if value is None or tensor is None or tensor.size > _LARGEST_TABLE:
            return False
        if value not in self._tables:
            numbers = tensor.numpy()
            self._tables[value] = bool(
                np.all(numbers == np.round(numbers)) and np.max(np.abs(numbers), initial=0) > self._half.whole_numbers
            )
        return self._tables[value]

    def _follow_integers(self, node: onnx_ir.Node) -> None:
        data = node.inputs[:1] if node.op_type.startswith("Gather") else node.inputs
        places = node.outputs[1:2] if node.op_type == "TopK" else node.outputs
        if node.op_type in INDEX_SOURCES or any(value in self._indices for value in data):
            self._indices.update(value for value in places if _is_integer(value))

    def _follow_products(self, node: onnx_ir.Node) -> None:
        moving = [value for value in node.inputs if value is not None and constant_of(value) is None]
        product = node.op_type == "Mul" and len(moving) > 1 and all(v in self._indices or v in self._born for v in moving)
        counted = node.op_type == "ReduceProd" and any(v in self._indices or v in self._born for v in moving)
        handed_on = any(value in self._unbounded for value in moving) and node.op_type in _TRACKED - _SHRINKING
        if node.op_type == "Size" or product or counted or handed_on:
            self._unbounded.update(value for value in node.outputs if _is_integer(value) or is_float(value))

    def _visit_reader(self, node: onnx_ir.Node) -> None:
        if node.op_type in PERIODIC and node.inputs[0] in self._positions:
            self._keep_back_from(node)
        elif self._half.has_float32_range:
            return
        elif node not in self.reasons and any(value in self._unbounded and value in self._born for value in node.inputs):
            self.reasons[node] = COUNT_REASON

    def _keep_back_from(self, node: onnx_ir.Node) -> None:
        stack = [node]
        while stack:
            current = stack.pop()
            if self.reasons.get(current) == POSITION_REASON:
                continue
            self.reasons[current] = POSITION_REASON
            makers = (value.producer() for value in current.inputs if value is not None and value in self._positions)
            stack += [maker for maker in makers if maker is not None]

    def _root(self, node: onnx_ir.Node) -> onnx_ir.Node:
        while (parent := self._parent[node]) is not node:
            self._parent[node] = self._parent[parent]
            node = parent
        return node


def _is_integer(value: onnx_ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def scaling_nodes(model: onnx_ir.Model) -> set[onnx_ir.Node]:
    """Float nodes between an integer product and its scaling, included, and the nodes that compute the scale.

    The sums are far beyond float16's range until they are scaled down.
    """
    found: set[onnx_ir.Node] = set()
    for node in _sums(model):
        if is_float(node.outputs[0]):
            found.add(node)
            if node.op_type in _SCALES:
                found |= _scale_makers(node)
    return found


def addend_nodes(model: onnx_ir.Model) -> set[onnx_ir.Node]:
    """Float nodes that compute elementwise an addend of an integer product, such as a bias, before its cast to integers."""
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
    """Yield the nodes behind an integer product up to its scaling, included."""
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
    """Return the nodes that compute a scale from the scales of both factors: the product can vanish in float16."""
    makers = (value.producer() for value in node.inputs if value is not None)
    return {maker for maker in makers if maker is not None and maker.op_type in _SCALES and _is_scale(maker)}


def _is_scale(node: onnx_ir.Node) -> bool:
    def known(value: onnx_ir.Value | None) -> bool:
        maker = value.producer() if value is not None else None
        return constant_of(value) is not None or (maker is not None and maker.op_type == "DynamicQuantizeLinear")

    return all(known(value) for value in node.inputs)
