"""Masks that are added to scores before a Softmax: numbers that float16 does not have become places that it can hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import FLOAT, all_nodes, asks_for_infinity
from export.onnx_fp16.planning.op_sets import MOVERS
from export.onnx_fp16.planning.reasons import KEEP
from export.onnx_fp16.repair.edits import Array, Maker, array_of, drop_constant, is_kept, is_op, number_of, opset_of, readers
from export.onnx_fp16.repair.fragile_chains import factor_of
from export.onnx_fp16.report import Repair
from export.weight_ledger import FP16_MAX

SOFTMAX = ("LogSoftmax", "Softmax")
THROUGH = frozenset({"Add", "Cast", "Mul", "Neg", "Sub", "Where"}) | MOVERS
FIRST_OPSET = 9  # Where
SOFT = FP16_MAX / 2  # so that two masks added are still a number
HIDDEN = SOFT / 2  # what is over it hides; no score that counts is
TEMPERATURES = (2.0**-6, 2.0)  # factors between a softened number and the Softmax after which what is hidden stays so
LONGEST_WAY = 12  # nodes from the addition to the Softmax
# Beside such a number a float32 score is lost, so it can be nothing but a mask; a smaller one may scale a penalty.
SURELY_A_MASK = 1e8
REASON = "a mask or penalty whose numbers float16 cannot hold"


class SoftenMasks:
    """scores + mask, with a mask of -1e9, hides a place; the score is lost in the sum, so a row that is hidden from end to end
    comes out even.

    In float16 the sum is -infinity in some places of such a row and not in others, or everywhere, which is NaN. So a mask's
    numbers become -32,752, and where it hides, its number takes the place of the sum. What may be a penalty instead, a factor
    of -1e5 on something that need not be 0 or 1, is kept in float32 up to the Softmax. So is a mask that is multiplied by a
    number like 1e-4, after which -1e9 hides still, and -32,752 does not.
    """

    name = "soften-masks"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Rewrite every such mask."""
        maker, repairs = Maker(model), []
        found = _masked_additions(model)
        inside = {node for addition, _, mask in found for node in (*mask.nodes, addition)}
        # Before anything reads them that is new.
        alone = [mask.is_sure and _is_private(mask, inside) and _hides_to_the_end(addition) for addition, _, mask in found]
        for (addition, index, mask), is_alone in zip(found, alone, strict=True):
            largest = max(float(np.abs(array[np.isfinite(array)]).max()) for array in mask.constants.values())
            if is_alone:
                for constant, array in mask.constants.items():
                    _soften(constant, array, {*mask.nodes, addition}, maker)
                _settle(addition, index, maker, is_sum=mask.is_sum)
                text = f"{largest:.3g} becomes {SOFT:g}, and takes the place of the scores that it hides"
            else:
                for node in (*mask.nodes, *_questions(mask), addition, *_way_to_softmax(addition.outputs[0])):
                    node.metadata_props.setdefault(KEEP, REASON)
                text = f"kept in float32: {REASON}"
            repairs.append(Repair(pass_name=self.name, nodes=(addition.name or "",), text=text))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """No such mask is left."""
        if left := _masked_additions(model):
            raise ValueError(f"the mask of {left[0][0].name} was not rewritten")


@dataclass
class _Mask:
    """What a mask is made of.

    Attributes:
        constants: Those that float16 cannot hold, with their numbers.
        nodes: That compute it.
        chosen: Whether it comes from booleans and whole numbers, and from no other floats.
        weakened: Whether it is multiplied by a number that leaves little of a softened one.
    """

    constants: dict[onnx_ir.Value, Array] = field(default_factory=dict)
    nodes: dict[onnx_ir.Node, None] = field(default_factory=dict)
    chosen: bool = True
    weakened: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether other numbers may be added to the large ones, such as penalties for what is far off."""
        return any(is_op(node, "Add") or (is_op(node, "Sub") and number_of(node.inputs[0]) is None) for node in self.nodes)

    @property
    def is_sure(self) -> bool:
        """Whether it cannot be anything but a mask, and a softened one hides as much."""
        finite = [array[np.isfinite(array)] for array in self.constants.values()]
        return not self.weakened and (self.chosen or all(np.abs(array).max() >= SURELY_A_MASK for array in finite))


def _masked_additions(model: onnx_ir.Model) -> list[tuple[onnx_ir.Node, int, _Mask]]:
    """The last additions (or subtractions) before a Softmax one side of which is a mask, that side's index, and the mask."""
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
    """Whether nobody else sees the numbers of a mask: its constants stand for what nobody may rely on."""
    inside = {*inside, *_questions(mask)}  # a softened number is as finite as the one before
    values = [value for node in mask.nodes for value in node.outputs]
    return not any(value.is_graph_output() or set(readers(value)) - inside for value in values)


def _questions(mask: _Mask) -> list[onnx_ir.Node]:
    """The nodes that ask whether the mask hides a whole row by -infinity, as a large number is in float16."""
    found = [node for made in mask.nodes for value in made.outputs for node in readers(value) if asks_for_infinity(node)]
    return found + [node for question in found for value in question.outputs for node in readers(value) if is_op(node, "Equal")]


def _way_to_softmax(value: onnx_ir.Value, longest: int = LONGEST_WAY) -> list[onnx_ir.Node]:
    """The nodes between a value and the Softmax, which included, if it goes nowhere else; empty where it does."""
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
    """A mask comes from constants, integers, booleans and inputs by nothing but additions, products, choices and moves."""
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


def _soften(value: onnx_ir.Value, array: Array, nodes: set[onnx_ir.Node], maker: Maker) -> None:
    """Let the mask read a constant that float16 holds, and leave the old one to others."""
    inside = [use for use in value.uses() if use.node in nodes]
    if not inside:
        return  # another Softmax shares the mask
    large = np.isfinite(array) & (np.abs(array) > FP16_MAX)
    soft = maker.constant(f"{value.name}/softened", np.where(large, np.sign(array) * SOFT, array))
    for use in inside:
        use.node.replace_input_with(use.idx, soft)
    drop_constant(value)


def _settle(addition: onnx_ir.Node, index: int, maker: Maker, *, is_sum: bool) -> None:
    total, uses, mask = addition.outputs[0], list(addition.outputs[0].uses()), addition.inputs[index]
    last = addition
    if is_op(addition, "Sub"):
        last = maker.node("Neg", [mask], last, behind=True)
        mask = last.outputs[0]
    bound = maker.constant(f"{addition.name}/bound", np.array(-HIDDEN))
    lowest = maker.constant(f"{addition.name}/lowest", np.array(-FP16_MAX))
    hidden = maker.node("Less", [mask, bound], last, onnx_ir.TensorType(onnx_ir.DataType.BOOL), behind=True)
    if is_sum:  # what a number like -1e9 swallows must not come out where all is hidden, and nothing is swallowed by -32,752
        soft = maker.constant(f"{addition.name}/once", np.array(-SOFT))
        edge = maker.constant(f"{addition.name}/edge", np.array(-SOFT - HIDDEN))
        twice = maker.node("Less", [mask, edge], hidden, onnx_ir.TensorType(onnx_ir.DataType.BOOL), behind=True)
        number = maker.node("Where", [twice.outputs[0], lowest, soft], twice, behind=True)
    else:
        number = maker.node("Max", [mask, lowest], hidden, behind=True)
    settled = maker.node("Where", [hidden.outputs[0], number.outputs[0], total], number, behind=True)
    for use in uses:
        use.node.replace_input_with(use.idx, settled.outputs[0])
