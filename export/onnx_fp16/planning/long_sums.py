"""Find the sums that grow with the size of the input: over an axis whose size may vary, and over the turns of a loop.

No sample shows how long such a sum becomes. A sum of 8,000 tokens leaves float16's range where one of 16 does not, and a loop
that adds in float16 stops growing once its term is less than half a step of its total. A mean may be written as a sum and a
division, so the sum stays float32 up to the node that scales it down. A node that reads weights ends that, since it was trained
on what it reads.

A contraction is such a sum too (a MatMul over an axis of variable size, as in linear attention), unless a softmax made its
factors: their sum is 1. A mean, a norm and a softmax are no sums: runtimes sum in float32 inside, and the results do not grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir

from halfserve.export.onnx_fp16.graph import (
    COMPARISONS,
    ELEMENTWISE,
    MOVERS,
    OPERATORS,
    Slot,
    all_nodes,
    constant_of,
    is_float,
    nodes_within,
    operators,
    slots_of,
)
from halfserve.export.onnx_fp16.planning.plan import CastingPlan
from halfserve.export.onnx_fp16.planning.weights import weight_of

SUM_REASON = "a sum that grows with the size of the input"
SCALING_REASON = "reads a sum that grows with the size of the input"
CARRIED_REASON = "a sum that a loop carries from turn to turn"

_REDUCTIONS = operators("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceProd ReduceSum ReduceSumSquare")
_CONTRACTIONS = operators("Einsum MatMul")
# Their results do not grow with what they read.
_SCALING = operators(
    """
    ArgMax ArgMin Clip GroupNormalization InstanceNormalization LayerNormalization Log LogSoftmax LpNormalization Min
    RMSNormalization Reciprocal Sigmoid Sign Softmax Sqrt Tanh TopK
    """
)
_GROWING = (ELEMENTWISE | MOVERS | _REDUCTIONS | _CONTRACTIONS | operators("CumSum ReduceMax ReduceMean ReduceMin")) - {"Cast"}
# A value that passes these alone is still the sum that it was, scaled or with a term more.
_LINEAR = (MOVERS - {"Gather", "GatherElements", "GatherND"}) | operators("Add Div Mul Neg Sub Sum Where")
_ADDING = operators("Add Sub Sum")
_WEIGHING = MOVERS | operators("Cast Dropout Where")
_LONGEST_WAY = 8  # nodes between a softmax and the product of its result


def keep_long_sums(plan: CastingPlan) -> None:
    """Keep sums over axes of variable size in float32, up to the nodes that scale them down, and sums that loops carry.

    In a type of float32's range, only the latter: a sum that is rounded once loses no more than any other number there.
    """
    grown: list[onnx_ir.Value] = []
    for node in list(all_nodes(plan.model)):
        for slot in slots_of(node):
            grown += _keep_carried(plan, slot)
    if plan.half.has_float32_range:
        return
    axes = _VariableAxes(plan.model)
    for node in all_nodes(plan.model):
        if not node.domain and any(map(is_float, node.outputs)) and axes.are_summed_by(node) and not _averages(node):
            plan.keep(node, SUM_REASON)
            grown += node.outputs
    _keep_up_to_scaling(plan, grown)


def _keep_up_to_scaling(plan: CastingPlan, grown: list[onnx_ir.Value]) -> None:
    seen: set[onnx_ir.Value] = set()
    while grown:
        value = grown.pop()
        if value in seen or not is_float(value):
            continue
        seen.add(value)
        for node, index in value.uses():
            if node.domain or _reads_weights(plan, node):
                continue
            if node.op_type in _SCALING | COMPARISONS or (node.op_type == "Div" and index == 1):
                plan.keep(node, SCALING_REASON)
            elif node.op_type in _GROWING:
                plan.keep(node, SCALING_REASON)
                grown += [] if node.op_type == "Div" else node.outputs


def _reads_weights(plan: CastingPlan, node: onnx_ir.Node) -> bool:
    return node.op_type in _CONTRACTIONS and any(
        value is not None and weight_of(plan, value) is not None for value in node.inputs
    )


class _VariableAxes:
    """The axes whose size the model's inputs leave open."""

    def __init__(self, model: onnx_ir.Model) -> None:
        dims = [list(value.shape) for value in model.graph.inputs if value.shape is not None]
        self._names = {dim.value for shape in dims for dim in shape if isinstance(dim, onnx_ir.SymbolicDim) and dim.value}
        # Where the batch alone is open, an axis of unknown size has a fixed one: shape inference did not find it.
        self._unknown_may_vary = any(not isinstance(dim, int) for shape in dims for dim in shape[1:])

    def are_summed_by(self, node: onnx_ir.Node) -> bool:
        """Return whether a node sums over such an axis."""
        shape = None if not node.inputs or node.inputs[0] is None else node.inputs[0].shape
        if node.op_type == "CumSum" or node.op_type in _REDUCTIONS:
            return shape is not None and any(self._may_vary(shape[axis]) for axis in _summed_axes(node, len(shape)))
        if node.op_type == "MatMul":
            sides = [value.shape for value in node.inputs if value is not None]
            both = [side[axis] for side, axis in zip(sides, (-1, -2), strict=True) if side and len(side) >= -axis]
            return self._are_named(both)
        return node.op_type == "Einsum" and any(map(self._are_named, _contracted(node)))

    def _may_vary(self, dim: int | onnx_ir.SymbolicDim) -> bool:
        return not isinstance(dim, int) and (self._is_named(dim) or self._unknown_may_vary)

    def _are_named(self, dims: list[int | onnx_ir.SymbolicDim]) -> bool:
        """Return whether an axis that two operands share varies. A product of unknown size is mostly an attention's over its
        heads.
        """
        return not any(isinstance(dim, int) for dim in dims) and any(map(self._is_named, dims))

    def _is_named(self, dim: int | onnx_ir.SymbolicDim) -> bool:
        text = None if isinstance(dim, int) else dim.value
        return text is not None and (text in self._names or bool(self._names & set(_words(text))))


def _words(text: str) -> list[str]:
    """Return the names in an expression such as "batch*length + 1"."""
    return "".join(letter if letter.isalnum() or letter in "_." else " " for letter in text).split()


def _summed_axes(node: onnx_ir.Node, rank: int) -> list[int]:
    given = node.attributes.get("axes")
    if given is not None:
        axes = list(given.as_ints())
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        tensor = constant_of(node.inputs[1])
        axes = list(range(rank)) if tensor is None else tensor.numpy().ravel().tolist()
    else:
        axes = [] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
    return [axis for axis in axes if -rank <= axis < rank]


def _contracted(node: onnx_ir.Node) -> Iterator[list[int | onnx_ir.SymbolicDim]]:
    """Yield the sizes of each label that an Einsum sums over."""
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if "." in equation or not arrow or len(terms) != len(node.inputs):
        return
    for label in sorted(set(left) - set(right) - {","}):
        shapes = [(value.shape, term) for value, term in zip(node.inputs, terms, strict=True) if value is not None]
        yield [shape[term.index(label)] for shape, term in shapes if label in term and shape and len(shape) == len(term)]


def _averages(node: onnx_ir.Node) -> bool:
    """Return whether one factor of a product comes from a softmax, so that the sum is an average."""
    return node.op_type in _CONTRACTIONS and any(_is_softmax(value, _LONGEST_WAY) for value in node.inputs)


def _is_softmax(value: onnx_ir.Value | None, longest: int) -> bool:
    node = None if value is None else value.producer()
    if node is None or node.domain or not longest:
        return False
    if node.op_type in _WEIGHING:
        return any(_is_softmax(source, longest - 1) for source in node.inputs if is_float(source))
    return node.op_type == "Softmax"


def _keep_carried(plan: CastingPlan, slot: Slot) -> list[onnx_ir.Value]:
    """Keep a sum that a Loop or Scan carries in this variable; returns the results that hold it."""
    if slot.node.op_type not in ("Loop", "Scan") or not slot.entering_at or not slot.leaving_at:
        return []
    ((body, _),) = slot.leaving_at
    start, (end,) = slot.inside[0], slot.leaving
    ways = _Ways(_linear_steps(body))
    if not any(step.node.op_type in _ADDING for step in ways.between(start, end)):
        return []
    results: list[onnx_ir.Value] = []
    for other in slots_of(slot.node):  # the variable itself, and each output that lists what is made of it
        steps = [step for leaving in other.leaving for step in ways.between(start, leaving)]
        for step in steps:
            if step.node.op_type in OPERATORS:
                plan.keep_group(step.result)
            else:
                plan.keep(step.node, CARRIED_REASON)
        if steps or start in other.leaving:
            plan.keep_group([*other.inside, *other.results][0])
            results += other.results
    return results


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """A node that passes a value on, or a variable of a node with bodies that does."""

    node: onnx_ir.Node
    source: onnx_ir.Value
    result: onnx_ir.Value


def _linear_steps(body: onnx_ir.Graph) -> Iterator[_Step]:
    for node in nodes_within(body):
        pairs: list[tuple[onnx_ir.Value | None, onnx_ir.Value]] = []
        if node.op_type in _LINEAR and not node.domain:
            pairs = [(source, result) for source in node.inputs for result in node.outputs]
        for slot in slots_of(node):
            pairs += [(source, inside) for source in slot.entering for inside in slot.inside]
            pairs += [(leaving, result) for leaving in slot.leaving for result in (*slot.results, *slot.inside)]
        for source, result in pairs:
            if source is not None and is_float(source) and is_float(result):
                yield _Step(node=node, source=source, result=result)


class _Ways:
    """Ways over these steps from one value of a body to another."""

    def __init__(self, steps: Iterable[_Step]) -> None:
        self._steps = list(steps)
        self._onward: dict[onnx_ir.Value, list[onnx_ir.Value]] = defaultdict(list)
        self._back: dict[onnx_ir.Value, list[onnx_ir.Value]] = defaultdict(list)
        for step in self._steps:
            self._onward[step.source].append(step.result)
            self._back[step.result].append(step.source)

    def between(self, start: onnx_ir.Value, end: onnx_ir.Value) -> list[_Step]:
        on_the_way = _reached(start, self._onward) & _reached(end, self._back)
        return [step for step in self._steps if step.source in on_the_way and step.result in on_the_way]


def _reached(start: onnx_ir.Value, onward: Mapping[onnx_ir.Value, list[onnx_ir.Value]]) -> set[onnx_ir.Value]:
    seen, stack = set[onnx_ir.Value](), [start]
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            stack += onward.get(value, ())
    return seen
