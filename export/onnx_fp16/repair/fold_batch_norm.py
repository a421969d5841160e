"""BatchNorm goes into the linear operator before it, in float64: its statistics need not fit float16 then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.repair.edits import Array, Maker, array_of, drop, is_kept, is_op, only_reader, take_place
from export.onnx_fp16.report import Repair
from export.weight_ledger import FP16_MAX, FP16_SMALLEST_NORMAL

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
EPSILON = 1e-5  # ONNX's default


@dataclass(frozen=True)
class _Affine:
    """What a BatchNorm does to each channel: x * factor + shift, both float64."""

    factor: Array
    shift: Array


class FoldBatchNorm:
    """y = (x - mean) / sqrt(var + eps) * scale + bias, with constants, as part of the weights of what made x.

    Where nothing linear stands before it, it becomes a multiplication and an addition, if their constants fit float16.
    """

    name = "fold-batch-norm"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Fold what can be folded."""
        maker, repairs = Maker(model), []
        for node in list(all_nodes(model)):
            affine = _affine_of(node)
            if affine is None:
                continue
            text = _folded(node, affine, maker) or _spelled_out(node, affine, maker)
            if text is not None:
                repairs.append(Repair(pass_name=self.name, nodes=(node.name or "",), text=text))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """No BatchNorm with constants stands behind a linear operator of its own."""
        for node in all_nodes(model):
            affine = _affine_of(node)
            if affine is not None and _foldable(node, affine) is not None:
                raise ValueError(f"{node.name} was not folded")


def _affine_of(node: onnx_ir.Node) -> _Affine | None:
    if not is_op(node, "BatchNormalization") or len(node.inputs) < 5 or is_kept(node):
        return None
    training = node.attributes.get("training_mode")
    spatial = node.attributes.get("spatial")
    if (training is not None and training.as_int()) or (spatial is not None and not spatial.as_int()):
        return None
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return None
    constants = [array_of(value) for value in node.inputs[1:5]]
    if any(constant is None for constant in constants):
        return None
    scale, bias, mean, var = (constant for constant in constants if constant is not None)
    epsilon = node.attributes.get("epsilon")
    with np.errstate(divide="ignore", invalid="ignore"):  # statistics that are none are left as they are
        factor = scale / np.sqrt(var + (EPSILON if epsilon is None else epsilon.as_float()))
        shift = bias - mean * factor
    return _Affine(factor, shift) if np.isfinite(factor).all() and np.isfinite(shift).all() else None


def _foldable(node: onnx_ir.Node, affine: _Affine) -> onnx_ir.Node | None:
    """The linear operator before a BatchNorm, if only that reads it and its weights are constant and of the same channels."""
    source = node.inputs[0]
    if source is None or only_reader(source) is not node:
        return None
    linear = source.producer()
    if linear is None or not is_op(linear, *LINEAR) or linear.graph is not node.graph or is_kept(linear):
        return None
    weight = array_of(linear.inputs[1])
    if weight is None or _channels(linear, weight) != affine.factor.size:
        return None
    bias = linear.inputs[2] if len(linear.inputs) > 2 else None
    if bias is not None and array_of(bias) is None:
        return None
    if is_op(linear, "MatMul") and (source.shape is None or len(source.shape) != 2):
        return None  # the channels of what is not a matrix are not the columns of its weights
    return linear


def _folded(node: onnx_ir.Node, affine: _Affine, maker: Maker) -> str | None:
    linear = _foldable(node, affine)
    weight = array_of(linear.inputs[1]) if linear is not None else None
    if linear is None or weight is None:
        return None
    bias = _bias(linear, affine)
    stem = linear.inputs[1].name if linear.inputs[1] is not None else linear.name
    inputs = [linear.inputs[0], maker.constant(f"{stem}/folded", _scaled(linear, weight, affine.factor))]
    if is_op(linear, "MatMul"):
        made = maker.node("Gemm", [*inputs, maker.constant(f"{stem}/folded_bias", bias)], linear)
    else:
        attributes = dict(linear.attributes)
        if "beta" in attributes:
            attributes["beta"] = onnx_ir.AttrFloat32("beta", 1.0)
        made = maker.node(linear.op_type, [*inputs, maker.constant(f"{stem}/folded_bias", bias)], linear)
        made.attributes.update(attributes)
    take_place(made.outputs[0], node.outputs[0])
    drop(node, linear)
    largest = float(np.abs(affine.factor).max(initial=0))
    return f"folded into {linear.op_type} {linear.name!r} in float64 (factors up to {largest:.3g})"


def _channels(linear: onnx_ir.Node, weight: Array) -> int | None:
    """How many output channels its weights have; None where they are no weights of such an operator."""
    if is_op(linear, "Conv"):
        return int(weight.shape[0])
    if is_op(linear, "ConvTranspose"):
        return int(weight.shape[1]) * _groups(linear)
    return int(weight.shape[0 if _transposed(linear) else 1]) if weight.ndim == 2 else None


def _scaled(linear: onnx_ir.Node, weight: Array, factor: Array) -> Array:
    """The weights with each output channel multiplied by its factor."""
    if is_op(linear, "ConvTranspose"):  # [in, out / groups, ...]: the groups lie along the inputs
        groups = _groups(linear)
        split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        by_group = factor.reshape(groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
        return np.asarray((split * by_group).reshape(weight.shape))
    if is_op(linear, "Conv"):
        return weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
    return weight * factor[:, None] if _transposed(linear) else weight * factor


def _groups(linear: onnx_ir.Node) -> int:
    group = linear.attributes.get("group")
    return 1 if group is None else group.as_int()


def _transposed(linear: onnx_ir.Node) -> bool:
    attribute = linear.attributes.get("transB")
    return attribute is not None and bool(attribute.as_int())


def _bias(linear: onnx_ir.Node, affine: _Affine) -> Array:
    old = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else None
    if old is None:
        return affine.shift
    beta = linear.attributes.get("beta")
    return np.asarray(old * (1.0 if beta is None else beta.as_float()) * affine.factor + affine.shift)


def _spelled_out(node: onnx_ir.Node, affine: _Affine, maker: Maker) -> str | None:
    source = node.inputs[0]
    var = array_of(node.inputs[4])
    if source is None or source.shape is None or var is None:
        return None
    plain = all(_within(constant) for constant in map(array_of, node.inputs[1:5]) if constant is not None)
    if plain and var.min(initial=1.0) >= FP16_SMALLEST_NORMAL:
        return None  # float16 holds it as it is
    if not _within(affine.factor) or not _within(affine.shift) or np.abs(affine.factor).max() < FP16_SMALLEST_NORMAL:
        return None
    shape = (-1, *[1] * (len(source.shape) - 2)) if len(source.shape) > 1 else (-1,)
    stem = node.name or "batch_norm"
    product = maker.node("Mul", [source, maker.constant(f"{stem}/factor", affine.factor.reshape(shape))], node)
    total = maker.node("Add", [product.outputs[0], maker.constant(f"{stem}/shift", affine.shift.reshape(shape))], node)
    take_place(total.outputs[0], node.outputs[0])
    drop(node)
    return "written as one multiplication and one addition, whose constants fit float16"


def _within(array: Array) -> bool:
    """Whether no number of an array is beyond float16's largest."""
    return bool(np.abs(array).max(initial=0) <= FP16_MAX)
