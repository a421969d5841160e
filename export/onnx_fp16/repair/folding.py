"""Multiplications behind a linear operator become part of its weights, in float64: BatchNorms and constant factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir

from halfserve.export.half_types import FP16_MAX, FP16_SMALLEST_NORMAL
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import all_nodes
from halfserve.export.onnx_fp16.repair.edits import (
    Array,
    NodeBuilder,
    RepairPass,
    array_of,
    drop,
    is_kept,
    is_op,
    only_reader,
    other_input,
    repair,
    take_place,
)

LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
DEFAULT_EPSILON = 1e-5

_Scales: TypeAlias = list[tuple[onnx_ir.Node, Array]]  # nodes and their factors: scalars, or one number per output channel


@dataclass(frozen=True)
class _Affine:
    """x * factor + shift: a BatchNorm by output channel, both float64 of shape [C]."""

    factor: Array
    shift: Array


def _fold_batch_norm(model: onnx_ir.Model) -> list[Repair]:
    """Fold y = (x - mean) / sqrt(var + eps) * scale + bias into the weights of the linear operator that made x."""
    return _rewritten_norms(model, _folded_norm)


def _spell_out_batch_norm(model: onnx_ir.Model) -> list[Repair]:
    """Write a BatchNorm as a multiplication and an addition, if float16 holds their constants and not the statistics."""
    return _rewritten_norms(model, _spelled_out)


def _rewritten_norms(model: onnx_ir.Model, rewrite: Callable[[onnx_ir.Node, _Affine, NodeBuilder], str | None]) -> list[Repair]:
    builder, repairs = NodeBuilder(model), []
    for node in list(all_nodes(model)):
        affine = _affine_of(node)
        text = None if affine is None else rewrite(node, affine, builder)
        if text is not None:
            repairs.append(repair(FOLD_BATCH_NORM.name, [node], text))
    return repairs


def _foldable_norms(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    for node in all_nodes(model):
        affine = _affine_of(node)
        if affine is not None and _foldable(node, affine) is not None:
            yield node


def _affine_of(node: onnx_ir.Node) -> _Affine | None:
    if not is_op(node, "BatchNormalization") or len(node.inputs) < 5 or is_kept(node):
        return None
    if node.attributes.get_int("training_mode", 0) or not node.attributes.get_int("spatial", 1):
        return None
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return None
    constants = [array for value in node.inputs[1:5] if (array := array_of(value)) is not None]
    if len(constants) != 4:
        return None
    scale, bias, mean, var = constants
    with np.errstate(divide="ignore", invalid="ignore"):  # a BatchNorm of invalid statistics stays as it is
        factor = scale / np.sqrt(var + node.attributes.get_float("epsilon", DEFAULT_EPSILON))
        shift = bias - mean * factor
    return _Affine(factor, shift) if np.isfinite(factor).all() and np.isfinite(shift).all() else None


def _foldable(node: onnx_ir.Node, affine: _Affine) -> onnx_ir.Node | None:
    """Return the linear operator before a BatchNorm, if only that reads it and its weights are constant and of the same
    channels.
    """
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
        return None  # only in a matrix are the channels, axis 1, the columns of the weights
    return linear


def _folded_norm(node: onnx_ir.Node, affine: _Affine, builder: NodeBuilder) -> str | None:
    linear = _foldable(node, affine)
    weight = array_of(linear.inputs[1]) if linear is not None else None
    if linear is None or weight is None:
        return None
    bias = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else None
    beta = linear.attributes.get_float("beta", 1.0)
    shift = affine.shift if bias is None else np.asarray(bias * beta * affine.factor + affine.shift)
    stem = linear.inputs[1].name if linear.inputs[1] is not None else linear.name
    inputs = [linear.inputs[0], builder.constant(f"{stem}/folded", _scaled(linear, weight, affine.factor))]
    op_type = "Gemm" if is_op(linear, "MatMul") else linear.op_type
    made = builder.node(op_type, [*inputs, builder.constant(f"{stem}/folded_bias", shift)], linear)
    if op_type == linear.op_type:
        made.attributes.update(linear.attributes)
        if "beta" in made.attributes:
            made.attributes["beta"] = onnx_ir.AttrFloat32("beta", 1.0)
    take_place(made.outputs[0], node.outputs[0])
    drop(node, linear)
    largest = float(np.abs(affine.factor).max(initial=0))
    return f"folded into {linear.op_type} {linear.name!r} in float64 (factors up to {largest:.3g})"


def _spelled_out(node: onnx_ir.Node, affine: _Affine, builder: NodeBuilder) -> str | None:
    source = node.inputs[0]
    var = array_of(node.inputs[4])
    if source is None or source.shape is None or var is None:
        return None
    fits = all(_within(constant) for constant in map(array_of, node.inputs[1:5]) if constant is not None)
    if fits and var.min(initial=1.0) >= FP16_SMALLEST_NORMAL:
        return None  # float16 holds it as it is
    if not _within(affine.factor) or not _within(affine.shift) or np.abs(affine.factor).max() < FP16_SMALLEST_NORMAL:
        return None
    shape = (-1, *[1] * (len(source.shape) - 2)) if len(source.shape) > 1 else (-1,)
    stem = node.name or "batch_norm"
    product = builder.node("Mul", [source, builder.constant(f"{stem}/factor", affine.factor.reshape(shape))], node)
    total = builder.node("Add", [product.outputs[0], builder.constant(f"{stem}/shift", affine.shift.reshape(shape))], node)
    take_place(total.outputs[0], node.outputs[0])
    drop(node)
    return "written as one multiplication and one addition, whose constants fit float16"


def _within(array: Array) -> bool:
    return bool(np.abs(array).max(initial=0) <= FP16_MAX)


def _fold_scale(model: onnx_ir.Model) -> list[Repair]:
    """Fold (x * W + b) * c = x * (W * c) + b * c where W or c does not fit float16, and W * c does.

    c is one number, or one for each output channel. Weights of 1e-9 with a factor of 2**28 become ordinary.
    """
    builder, repairs = NodeBuilder(model), []
    for linear in [node for node in all_nodes(model) if is_op(node, *LINEAR)]:
        scales = _scales_behind(linear)
        text = _folded_scales(linear, scales, builder) if scales else None
        if text is not None:
            repairs.append(repair(FOLD_SCALE.name, (linear, *(node for node, _ in scales)), text))
    return repairs


def _foldable_scales(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    for node in all_nodes(model):
        if is_op(node, *LINEAR) and (scales := _scales_behind(node)) and _pays(node, scales):
            yield node


def _scales_behind(linear: onnx_ir.Node) -> _Scales:
    """Return the multiplications and divisions by constants that follow, each the only reader of the one before."""
    found: _Scales = []
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
    """Return a constant as one number or one for each output channel; None where it has another shape, or is zero somewhere."""
    rank = weight.ndim
    if is_op(linear, "MatMul"):  # at least one less where the result's shape is unknown
        shape = linear.outputs[0].shape
        rank = len(shape) if shape is not None else weight.ndim - 1
    if not constant.size or not np.isfinite(constant).all() or not constant.all() or constant.ndim > rank:
        return None
    if constant.size == 1:
        return constant.reshape(())
    if is_op(linear, "ConvTranspose") or (not is_op(linear, "Conv") and weight.ndim != 2):
        return None
    axes_behind = weight.ndim - 2  # none for a matrix
    axis = constant.ndim - 1 - axes_behind
    fits = axis >= 0 and constant.shape[axis] == constant.size == _channels(linear, weight)
    return constant.reshape(-1) if fits else None


def _pays(linear: onnx_ir.Node, scales: _Scales) -> bool:
    weight = array_of(linear.inputs[1])
    bias = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else np.zeros(())
    if weight is None or bias is None or not weight.size or is_kept(linear, *(node for node, _ in scales)):
        return False
    factor = _product(scales)
    parts = [weight, *(factor for _, factor in scales)]
    gains = not all(map(_is_ordinary, parts)) and _is_ordinary(_scaled(linear, weight, factor))
    return gains and np.abs(bias * factor).max(initial=0) <= FP16_MAX


def _product(scales: _Scales) -> Array:
    total = np.ones(())
    for _, factor in scales:
        total = total * factor
    return total


def _is_ordinary(array: Array) -> bool:
    """Return whether the largest number of an array is well within float16's normal numbers."""
    largest = float(np.abs(array).max(initial=0))
    return largest == 0 or FP16_SMALLEST_NORMAL * 2**4 <= largest <= FP16_MAX


def _folded_scales(linear: onnx_ir.Node, scales: _Scales, builder: NodeBuilder) -> str | None:
    weight = array_of(linear.inputs[1])
    if weight is None or not _pays(linear, scales):
        return None
    factor = _product(scales)
    stem = linear.inputs[1].name if linear.inputs[1] is not None else linear.name
    inputs = [linear.inputs[0], builder.constant(f"{stem}/scaled", _scaled(linear, weight, factor))]
    bias = array_of(linear.inputs[2]) if len(linear.inputs) > 2 else None
    if bias is not None:
        inputs.append(builder.constant(f"{stem}/scaled_bias", np.asarray(bias * factor)))
    made = builder.node(linear.op_type, inputs, linear)
    made.attributes.update(linear.attributes)
    take_place(made.outputs[0], scales[-1][0].outputs[0])
    drop(*(node for node, _ in reversed(scales)), linear)
    return f"the weights take over the factor {float(np.abs(factor).max()):.3g} that followed"


def _channels(linear: onnx_ir.Node, weight: Array) -> int | None:
    """Return the number of output channels; None where the weights of a product are no matrix."""
    if is_op(linear, "Conv"):
        return int(weight.shape[0])
    if is_op(linear, "ConvTranspose"):
        return int(weight.shape[1]) * _groups(linear)
    return int(weight.shape[0 if _is_transposed(linear) else 1]) if weight.ndim == 2 else None


def _scaled(linear: onnx_ir.Node, weight: Array, factor: Array) -> Array:
    """Return the weights times a scalar, or with each output channel times its factor."""
    if not factor.ndim:
        return np.asarray(weight * factor)
    if is_op(linear, "ConvTranspose"):  # [in, out / groups, ...]: the groups lie along the inputs
        groups = _groups(linear)
        split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        by_group = factor.reshape(groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
        return np.asarray((split * by_group).reshape(weight.shape))
    if is_op(linear, "Conv") or _is_transposed(linear):
        factor = factor.reshape(-1, *[1] * (weight.ndim - 1))
    return np.asarray(weight * factor)


def _groups(linear: onnx_ir.Node) -> int:
    return linear.attributes.get_int("group", 1)


def _is_transposed(linear: onnx_ir.Node) -> bool:
    return bool(linear.attributes.get_int("transB", 0))


FOLD_BATCH_NORM = RepairPass(name="fold-batch-norm", call=_fold_batch_norm, left=_foldable_norms)
SPELL_OUT_BATCH_NORM = RepairPass(name="fold-batch-norm", call=_spell_out_batch_norm)
FOLD_SCALE = RepairPass(name="fold-scale", call=_fold_scale, left=_foldable_scales)
