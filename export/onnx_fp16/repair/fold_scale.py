"""A number that multiplies the result of a linear operator goes into its weights, where one of the two does not fit float16."""

from __future__ import annotations

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.repair.edits import (
    Array,
    Maker,
    array_of,
    drop,
    is_kept,
    is_op,
    number_of,
    only_reader,
    other_input,
    take_place,
)
from export.onnx_fp16.report import Repair
from export.weight_ledger import FP16_MAX, FP16_SMALLEST_NORMAL

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class FoldScale:
    """(x * W + b) * c = x * (W * c) + b * c: weights of 1e-9 that 2**28 multiplies behind the product become ordinary."""

    name = "fold-scale"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Fold factor after factor while there are any."""
        maker, repairs = Maker(model), []
        for linear in [node for node in all_nodes(model) if is_op(node, *LINEAR)]:
            scales = _scales_behind(linear)
            text = _folded(linear, scales, maker) if scales else None
            if text is not None:
                names = tuple(node.name or "" for node in (linear, *(node for node, _ in scales)))
                repairs.append(Repair(pass_name=self.name, nodes=names, text=text))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """What was folded is ordinary now."""
        for node in all_nodes(model):
            scales = _scales_behind(node) if is_op(node, *LINEAR) else []
            if scales and _pays(node, scales):
                raise ValueError(f"the factors behind {node.name} were not folded")


def _scales_behind(linear: onnx_ir.Node) -> list[tuple[onnx_ir.Node, float]]:
    """The multiplications and divisions by one number that follow, each the only reader of the one before."""
    found: list[tuple[onnx_ir.Node, float]] = []
    value = linear.outputs[0]
    while (node := only_reader(value)) is not None and node.graph is linear.graph and is_op(node, "Mul", "Div"):
        number = number_of(other_input(node, value))
        if number is None or number == 0 or (is_op(node, "Div") and node.inputs[0] is not value):
            break
        found.append((node, number if is_op(node, "Mul") else 1 / number))
        value = node.outputs[0]
    return found


def _pays(linear: onnx_ir.Node, scales: list[tuple[onnx_ir.Node, float]]) -> bool:
    weight = array_of(linear.inputs[1])
    bias = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else np.zeros(1)
    if weight is None or bias is None or not weight.size or is_kept(linear, *(node for node, _ in scales)):
        return False
    factor = float(np.prod([number for _, number in scales]))
    parts = [weight, *(np.array([number]) for _, number in scales)]
    return not all(map(_is_ordinary, parts)) and _is_ordinary(weight * factor) and np.abs(bias * factor).max() <= FP16_MAX


def _is_ordinary(array: Array) -> bool:
    """Whether most of what counts in an array is within float16's normal numbers."""
    largest = float(np.abs(array).max(initial=0))
    return largest == 0 or FP16_SMALLEST_NORMAL * 2**4 <= largest <= FP16_MAX


def _folded(linear: onnx_ir.Node, scales: list[tuple[onnx_ir.Node, float]], maker: Maker) -> str | None:
    weight = array_of(linear.inputs[1])
    if weight is None or not _pays(linear, scales):
        return None
    factor = float(np.prod([number for _, number in scales]))
    stem = linear.inputs[1].name if linear.inputs[1] is not None else linear.name
    inputs = [linear.inputs[0], maker.constant(f"{stem}/scaled", weight * factor)]
    bias = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else None
    if bias is not None:
        inputs.append(maker.constant(f"{stem}/scaled_bias", bias * factor))
    made = maker.node(linear.op_type, inputs, linear)
    made.attributes.update(linear.attributes)
    last = scales[-1][0]
    take_place(made.outputs[0], last.outputs[0])
    drop(*(node for node, _ in reversed(scales)), linear)
    return f"the weights take over the factor {factor:.3g} that followed"
