"""Attention masks whose numbers float16 does not have: softened, or kept in float32.

A mask is added to scores before a Softmax. scores + mask, with a mask of -1e9, hides a place; the score is lost in the sum, so
a row that is hidden from end to end comes out even. In float16 the sum is -infinity in some places of such a row and not in
others, or everywhere, which is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir

from halfserve.export.half_types import FP16_MAX, FP16_OVERFLOW
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import FLOAT, MOVERS, all_nodes, asks_for_infinity
from halfserve.export.onnx_fp16.planning.plan import KEEP_FP32
from halfserve.export.onnx_fp16.repair.edits import (
    Array,
    NodeBuilder,
    RepairPass,
    array_of,
    drop_constant,
    is_kept,
    is_op,
    keep,
    number_of,
    opset_of,
    readers,
    repair,
)
from halfserve.export.onnx_fp16.repair.fragile_chains import factor_of

SOFTMAX = ("LogSoftmax", "Softmax")
THROUGH = frozenset({"Add", "Cast", "Mul", "Neg", "Sub", "Where"}) | MOVERS
FIRST_OPSET = 9  # Where
SOFT = FP16_MAX / 2  # so that two masks added are still a number
HIDDEN = SOFT / 2  # a score below -HIDDEN counts as hidden; real scores are larger
TEMPERATURES = (2.0**-6, 2.0)  # factors between a softened number and the Softmax after which what is hidden stays so
LONGEST_WAY = 12  # nodes from the addition to the Softmax
# Beside such a number a float32 score is lost, so it can be nothing but a mask; a smaller one may scale a penalty.
SURELY_A_MASK = 1e8
REASON = "a mask or penalty whose numbers float16 cannot hold"
OUTGROWN_REASON = "masks that together outgrow float16"
PASSED = frozenset({"Add", "Cast", "Div", "Mul", "Neg", "Sub", "Where"}) | MOVERS
A_MASK = 1024.0  # smaller numbers are biases, or the ones of 1 - mask: they hide nothing
MOST_NODES = 64  # before a Softmax


def _soften_masks(model: onnx_ir.Model) -> list[Repair]:
    """Replace a mask's large numbers by -32,752, and where it hides, put its number in the place of the sum.

    What may be a penalty instead, a factor of -1e5 on something that need not be 0 or 1, is kept in float32 up to the Softmax.
    So is a mask that is multiplied by a number like 1e-4, after which -1e9 still hides and -32,752 does not.
    """
    builder, repairs = NodeBuilder(model), []
    found = _masked_additions(model)
    inside = {node for addition, _, mask in found for node in (*mask.nodes, addition)}
    # Decided before the rewriting, which adds readers.
    alone = [mask.is_sure and _is_private(mask, inside) and _hides_to_the_end(addition) for addition, _, mask in found]
    for (addition, index, mask), is_alone in zip(found, alone, strict=True):
        largest = max(float(np.abs(array[np.isfinite(array)]).max()) for array in mask.constants.values())
        if is_alone:
            for constant, array in mask.constants.items():
                _soften(constant, array, {*mask.nodes, addition}, builder)
            _settle(addition, index, builder, is_sum=mask.is_sum)
            text = f"{largest:.3g} becomes {SOFT:g}, and takes the place of the scores that it hides"
        else:
            for node in (*mask.nodes, *_infinity_tests(mask), addition, *_way_to_softmax(addition.outputs[0])):
                node.metadata_props.setdefault(KEEP_FP32, REASON)
            text = f"kept in float32: {REASON}"
        repairs.append(repair(SOFTEN_MASKS.name, [addition], text))
    return repairs


@dataclass
class _Mask:
    """The parts of a mask.

    Attributes:
        constants: The constants that float16 cannot hold, with their numbers in float64.
        nodes: The nodes that compute the mask.
        chosen: Whether it is computed from booleans, integers and constants alone.
        weakened: Whether a factor leaves little of a softened number.
    """

    constants: dict[onnx_ir.Value, Array] = field(default_factory=dict)
    nodes: dict[onnx_ir.Node, None] = field(default_factory=dict)
    chosen: bool = True
    weakened: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether other numbers, such as distance penalties, may be added to the large ones."""
        return any(is_op(node, "Add") or (is_op(node, "Sub") and number_of(node.inputs[0]) is None) for node in self.nodes)

    @property
    def is_sure(self) -> bool:
        """Whether it can be nothing but a mask, and hides as much when softened."""
        finite = [array[np.isfinite(array)] for array in self.constants.values()]
        return not self.weakened and (self.chosen or all(np.abs(array).max() >= SURELY_A_MASK for array in finite))


def _masked_additions(model: onnx_ir.Model) -> list[tuple[onnx_ir.Node, int, _Mask]]:
    """Return the last additions or subtractions of a mask before a Softmax, the index of the mask's side, and the mask."""
    if opset_of(model) < FIRST_OPSET:
        return []
    found = []
    for node in all_nodes(model):
        if is_op(node, "Add", "Sub") and not is_kept(node) and _way_to_softmax(node.outputs[0]):
            sides = range(2) if is_op(node, "Add") else range(1, 2)
            masks = [(index, mask) for index in sides if (mask := _mask_of(node.inputs[index])).constants]
            if len(masks) == 1:
                found.append((node, *masks[0]))
    return found


def _is_private(mask: _Mask, inside: set[onnx_ir.Node]) -> bool:
    """Return whether no node outside reads a number of the mask, so that its constants may change."""
    inside = {*inside, *_infinity_tests(mask)}  # a softened number is as finite as the one before
    values = [value for node in mask.nodes for value in node.outputs]
    return not any(value.is_graph_output() or set(readers(value)) - inside for value in values)


def _infinity_tests(mask: _Mask) -> list[onnx_ir.Node]:
    """Return the nodes that test whether the mask hides a whole row by -infinity, which a large number is in float16."""
    found = [node for made in mask.nodes for value in made.outputs for node in readers(value) if asks_for_infinity(node)]
    return found + [node for test in found for value in test.outputs for node in readers(value) if is_op(node, "Equal")]


def _way_to_softmax(value: onnx_ir.Value, longest: int = LONGEST_WAY) -> list[onnx_ir.Node]:
    """Return the nodes from a value up to the Softmax, if all its readers lead there; else none."""
    if value.is_graph_output() or not longest:
        return []
    way = []
    for node in readers(value):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue  # dead
        beyond = _way_to_softmax(node.outputs[0], longest - 1) if is_op(node, *MOVERS) or factor_of(node) else []
        if not beyond and not is_op(node, *SOFTMAX):
            return []
        way += [node, *beyond]
    return way


def _hides_to_the_end(addition: onnx_ir.Node) -> bool:
    factors = [factor for node in _way_to_softmax(addition.outputs[0]) if (factor := factor_of(node)) is not None]
    return all(TEMPERATURES[0] <= factor <= TEMPERATURES[1] for factor in factors)


def _mask_of(value: onnx_ir.Value | None) -> _Mask:
    """Return the mask that a value is: additions, products, choices and moves of constants, integers, booleans and inputs."""
    mask, waiting, seen = _Mask(), [value], set[onnx_ir.Value]()
    while waiting:
        current = waiting.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        array = array_of(current)
        maker = current.producer()
        if array is not None:
            finite = array[np.isfinite(array)]
            largest = np.abs(finite).max(initial=0.0)
            if largest > FP16_MAX:
                mask.constants[current] = array
            mask.weakened |= 0 < largest < TEMPERATURES[0] and any(is_op(node, "Mul") for node in readers(current))
        elif current.type is not None and current.dtype != FLOAT:
            continue
        elif maker is None:
            mask.chosen = False
        elif is_op(maker, *THROUGH):
            mask.nodes[maker] = None
            waiting += maker.inputs
        else:
            return _Mask()
    return mask


def _soften(value: onnx_ir.Value, array: Array, nodes: set[onnx_ir.Node], builder: NodeBuilder) -> None:
    """Let the mask read a constant that float16 holds; other readers keep the old one."""
    inside = [use for use in value.uses() if use.node in nodes]
    if not inside:
        return  # softened already, for another Softmax
    large = np.isfinite(array) & (np.abs(array) > FP16_MAX)
    soft = builder.constant(f"{value.name}/softened", np.where(large, np.sign(array) * SOFT, array))
    for use in inside:
        use.node.replace_input_with(use.idx, soft)
    drop_constant(value)


def _settle(addition: onnx_ir.Node, index: int, builder: NodeBuilder, *, is_sum: bool) -> None:
    total, uses, mask = addition.outputs[0], list(addition.outputs[0].uses()), addition.inputs[index]
    last = addition
    if is_op(addition, "Sub"):
        last = builder.node("Neg", [mask], last, behind=True)
        mask = last.outputs[0]
    bound = builder.constant(f"{addition.name}/bound", np.array(-HIDDEN))
    lowest = builder.constant(f"{addition.name}/lowest", np.array(-FP16_MAX))
    hidden = builder.node("Less", [mask, bound], last, onnx_ir.TensorType(onnx_ir.DataType.BOOL), behind=True)
    if is_sum:  # -1e9 absorbs what is added to it and -32,752 does not: the sum must not show through a hidden row
        soft = builder.constant(f"{addition.name}/once", np.array(-SOFT))
        edge = builder.constant(f"{addition.name}/edge", np.array(-SOFT - HIDDEN))
        twice = builder.node("Less", [mask, edge], hidden, onnx_ir.TensorType(onnx_ir.DataType.BOOL), behind=True)
        number = builder.node("Where", [twice.outputs[0], lowest, soft], twice, behind=True)
    else:
        number = builder.node("Max", [mask, lowest], hidden, behind=True)
    settled = builder.node("Where", [hidden.outputs[0], number.outputs[0], total], number, behind=True)
    for use in uses:
        use.node.replace_input_with(use.idx, settled.outputs[0])


def _keep_masks(model: onnx_ir.Model) -> list[Repair]:
    """Mark masks whose sum or product float16 does not hold though it holds each number: (1 - m) * -30000 * 8, or -60000 twice.

    Where such a mask hides a whole row, all of it is -infinity in float16, and the Softmax gives NaN; in float32 it is finite.
    """
    repairs: list[Repair] = []
    for softmax in all_nodes(model):
        if is_op(softmax, *SOFTMAX) and softmax.inputs[0] is not None and softmax.inputs[0].dtype == FLOAT:
            repairs += keep(_outgrowing(softmax), OUTGROWN_REASON, KEEP_MASKS.name)
    return repairs


def _outgrowing(softmax: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """Yield the nodes that read or make a mask beyond float16's range, the Softmax included."""
    sizes: dict[onnx_ir.Value | None, float] = {}
    for node in _in_order(softmax):
        inputs = [_constant_size(node, value) if value not in sizes else sizes[value] for value in node.inputs]
        size = 0.0 if node is softmax else _size(node, inputs)
        sizes[node.outputs[0]] = size
        if max(size, *inputs) >= FP16_OVERFLOW:
            yield node


def _in_order(softmax: onnx_ir.Node) -> list[onnx_ir.Node]:
    """Return the nodes that compute a Softmax's masks in topological order, the Softmax last."""
    order: dict[onnx_ir.Node, None] = {}
    waiting, seen = [(softmax, False)], {softmax}
    while waiting:
        node, done = waiting.pop()
        if done:
            order[node] = None
            continue
        waiting.append((node, True))
        for value in node.inputs:
            maker = value.producer() if value is not None and value.dtype == FLOAT else None
            if maker is not None and maker not in seen and len(seen) < MOST_NODES and _is_passed(maker):
                seen.add(maker)
                waiting.append((maker, False))
    return list(order)


def _is_passed(node: onnx_ir.Node) -> bool:
    """Return whether a mask passes through a node: not through the Where of `_settle`, which replaces what has outgrown
    float16.
    """
    return is_op(node, *PASSED) and not (
        is_op(node, "Where") and node.inputs[0] is not None and is_op(node.inputs[0].producer(), "Less")
    )


def _size(node: onnx_ir.Node, inputs: list[float]) -> float:
    """Return the largest magnitude of a node's result from masks alone; 0 where it reads none."""
    if is_op(node, "Mul"):
        return inputs[0] * inputs[1]
    if is_op(node, "Div"):
        array = array_of(node.inputs[1])
        return 0.0 if array is None or not array.all() else inputs[0] / float(np.abs(array).min(initial=np.inf))
    if is_op(node, "Add", "Sub"):
        return sum(inputs) if min(inputs) >= A_MASK else max(inputs)
    return max(inputs[1:] if is_op(node, "Where") else inputs[: None if is_op(node, "Concat") else 1])


def _constant_size(node: onnx_ir.Node, value: onnx_ir.Value | None) -> float:
    """Return the largest magnitude of an input that no mask node makes: 1 for integers and booleans, 0 for scores."""
    if value is None:
        return 0.0
    if value.dtype is not None and value.dtype != FLOAT:
        return 1.0
    array = array_of(value)
    if array is None:
        return 0.0
    largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
    return largest if is_kept(node) else min(largest, FP16_MAX)


SOFTEN_MASKS = RepairPass(
    name="soften-masks",
    call=_soften_masks,
    left=lambda model: (addition for addition, _, _ in _masked_additions(model)),
)
KEEP_MASKS = RepairPass(name="keep-masks", call=_keep_masks)
