"""Numbers that multiply the result of a linear operator go into its weights, where one of the two does not fit float16."""

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
    only_reader,
    other_input,
    take_place,
)
from export.onnx_fp16.report import Repair
from export.weight_ledger import FP16_MAX, FP16_SMALLEST_NORMAL

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")


class FoldScale:
    """(x * W + b) * c = x * (W * c) + b * c: weights of 1e-9 that 2**28 multiplies behind the product become ordinary.

    c is one number, or one for each output channel: a BatchNorm that was taken apart before.
    """

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


def _scales_behind(linear: onnx_ir.Node) -> list[tuple[onnx_ir.Node, Array]]:
    """The multiplications and divisions by constants that follow, each the only reader of the one before.

    A factor is a scalar or has one number for each output channel, shape [C].
    """
    found: list[tuple[onnx_ir.Node, Array]] = []
    weight = array_of(linear.inputs[1])
    value = linear.outputs[0]
    while (node := only_reader(value)) is not None and node.graph is linear.graph and is_op(node, "Mul", "Div"):
        constant = array_of(other_input(node, value))
        factor = None if constant is None or weight is None else _by_channel(linear, weight, constant)
        if factor is None or (is_op(node, "Div") and node.inputs[0] is not value):
            break
        found.append((node, factor if is_op(node, "Mul") else 1 / factor))
        value = node.outputs[0]
    return found


def _by_channel(linear: onnx_ir.Node, weight: Array, constant: Array) -> Array | None:
    """A constant as one number or one for each output channel; None where it is neither, or is zero somewhere."""
    if not constant.size or not np.isfinite(constant).all() or not constant.all() or constant.ndim > _rank(linear, weight):
        return None
    if constant.size == 1:
        return constant.reshape(())
    if is_op(linear, "Conv"):
        channels, behind = weight.shape[0], weight.ndim - 2
    elif is_op(linear, "Gemm", "MatMul") and weight.ndim == 2:
        channels, behind = weight.shape[0 if _is_transposed(linear) else 1], 0
    else:
        return None
    place = constant.ndim - 1 - behind
    return constant.reshape(-1) if place >= 0 and constant.shape[place] == constant.size == channels else None


def _rank(linear: onnx_ir.Node, weight: Array) -> int:
    """The rank of a linear operator's result; the least that it can have where that is not known."""
    if is_op(linear, "MatMul"):
        shape = linear.outputs[0].shape
        return len(shape) if shape is not None else weight.ndim - 1
    return weight.ndim


def _is_transposed(linear: onnx_ir.Node) -> bool:
    attribute = linear.attributes.get("transB")
    return attribute is not None and attribute.as_int() == 1


def _product(scales: list[tuple[onnx_ir.Node, Array]]) -> Array:
    total = np.ones(())
    for _, factor in scales:
        total = total * factor
    return total


def _scaled(linear: onnx_ir.Node, weight: Array, factor: Array) -> Array:
    """The weights with each output channel multiplied by its factor."""
    if factor.ndim and (is_op(linear, "Conv") or _is_transposed(linear)):
        factor = factor.reshape(-1, *[1] * (weight.ndim - 1))
    return np.asarray(weight * factor)


def _pays(linear: onnx_ir.Node, scales: list[tuple[onnx_ir.Node, Array]]) -> bool:
    weight = array_of(linear.inputs[1])
    bias = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else np.zeros(())
    if weight is None or bias is None or not weight.size or is_kept(linear, *(node for node, _ in scales)):
        return False
    factor = _product(scales)
    parts = [weight, *(factor for _, factor in scales)]
    gains = not all(map(_is_ordinary, parts)) and _is_ordinary(_scaled(linear, weight, factor))
    return gains and np.abs(bias * factor).max(initial=0) <= FP16_MAX


def _is_ordinary(array: Array) -> bool:
    """Whether most of what counts in an array is within float16's normal numbers."""
    largest = float(np.abs(array).max(initial=0))
    return largest == 0 or FP16_SMALLEST_NORMAL * 2**4 <= largest <= FP16_MAX


def _folded(linear: onnx_ir.Node, scales: list[tuple[onnx_ir.Node, Array]], maker: Maker) -> str | None:
    weight = array_of(linear.inputs[1])
    if weight is None or not _pays(linear, scales):
        return None
    factor = _product(scales)
    stem = linear.inputs[1].name if linear.inputs[1] is not None else linear.name
    inputs = [linear.inputs[0], maker.constant(f"{stem}/scaled", _scaled(linear, weight, factor))]
    bias = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else None
    if bias is not None:
        inputs.append(maker.constant(f"{stem}/scaled_bias", np.asarray(bias * factor)))
    made = maker.node(linear.op_type, inputs, linear)
    made.attributes.update(linear.attributes)
    last = scales[-1][0]
    take_place(made.outputs[0], last.outputs[0])
    drop(*(node for node, _ in reversed(scales)), linear)
    return f"the weights take over the factor {float(np.abs(factor).max()):.3g} that followed"
