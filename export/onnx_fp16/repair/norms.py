"""Layer norms in parts become LayerNormalization, which sums in float32 for every input type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir

from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import FLOAT, all_nodes
from halfserve.export.onnx_fp16.repair.edits import (
    NodeBuilder,
    RepairPass,
    array_of,
    axes_of,
    drop,
    is_kept,
    is_op,
    keep,
    keeps_axes,
    made_for,
    number_of,
    only_reader,
    opset_of,
    other_input,
    readers,
    repair,
    take_place,
)
from halfserve.export.onnx_fp16.repair.fragile_chains import is_square

FIRST_OPSET_WITH_LAYER_NORM = 17
FUSED = "one LayerNormalization, which sums in float32"


def _offer(opset: int) -> str:
    return (
        f"part of a LayerNormalization, one operator from opset {FIRST_OPSET_WITH_LAYER_NORM} on; the model has {opset}: "
        "--upgrade-opset (upgrade_opset=True) raises it"
    )


def _roots(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    return [node for node in all_nodes(model) if is_op(node, "Sqrt")]


@dataclass(frozen=True)
class _Norm:
    """The parts of (x - mean) / sqrt(mean((x - mean)**2) + epsilon) * scale + bias over the last axis."""

    source: onnx_ir.Value
    size: int
    epsilon: float
    scale: onnx_ir.Value | None
    bias: onnx_ir.Value | None
    last: onnx_ir.Node
    parts: tuple[onnx_ir.Node, ...]


def _fuse_layer_norm(model: onnx_ir.Model) -> list[Repair]:
    """Fuse layer norms; below opset 17, which lacks the operator, keep them in float32 and offer to raise the opset."""
    builder, repairs, opset = NodeBuilder(model), list[Repair](), opset_of(model)
    for root in _roots(model):
        norm = _norm_at(root)
        if norm is None:
            continue
        if opset < FIRST_OPSET_WITH_LAYER_NORM:
            repairs += keep(norm.parts, _offer(opset), FUSE_LAYER_NORM.name)
            continue
        scale = norm.scale or builder.constant(f"{norm.last.name}/ones", np.ones(norm.size))
        inputs = [norm.source, scale, *([norm.bias] if norm.bias is not None else [])]
        made = builder.node("LayerNormalization", inputs, norm.last, axis=-1, epsilon=norm.epsilon)
        take_place(made.outputs[0], norm.last.outputs[0])
        drop(*norm.parts)
        repairs.append(repair(FUSE_LAYER_NORM.name, norm.parts, FUSED))
    return repairs


@dataclass(frozen=True)
class _Centre:
    """The front half of a norm: x - mean, and the mean of its square plus an epsilon, up to the root."""

    source: onnx_ir.Value
    size: int
    epsilon: float
    centred: onnx_ir.Value
    parts: tuple[onnx_ir.Node, ...]


def _norm_at(root: onnx_ir.Node) -> _Norm | None:
    centre = _centre_at(root)
    divided = None if centre is None else _divided(root, centre.centred)
    if centre is None or divided is None:
        return None
    quotient, *inverse = divided
    if {use.node for use in centre.centred.uses()} - {quotient, *centre.parts}:
        return None
    scaled, scale = _then(quotient, "Mul", centre.size)
    last, bias = _then(scaled, "Add", centre.size)
    parts = (*centre.parts, root, *inverse, quotient, scaled, last)
    if is_kept(*parts):
        return None
    return _Norm(centre.source, centre.size, centre.epsilon, scale, bias, last, tuple(dict.fromkeys(parts)))


def _centre_at(root: onnx_ir.Node) -> _Centre | None:
    plus = made_for(root, root.inputs[0], "Add")
    variance = next((node for value in (plus.inputs if plus else ()) if (node := made_for(plus, value, "ReduceMean"))), None)
    square = made_for(variance, variance.inputs[0], "Pow", "Mul") if variance else None
    centred = square.inputs[0].producer() if square and square.inputs[0] is not None else None
    mean = made_for(centred, centred.inputs[1], "ReduceMean") if centred is not None and is_op(centred, "Sub") else None
    if plus is None or variance is None or square is None or centred is None or mean is None:
        return None
    source, epsilon = centred.inputs[0], next((number for number in map(_scalar, plus.inputs) if number is not None), None)
    size = _last_size(source)
    same = source is not None and mean.inputs[0] is source and not centred.outputs[0].is_graph_output()
    sound = is_square(square) and _over_the_last(variance) and _over_the_last(mean)
    if source is None or epsilon is None or size is None or not (same and sound):
        return None
    return _Centre(source, size, epsilon, centred.outputs[0], (mean, centred, square, variance, plus))


def _last_size(value: onnx_ir.Value | None) -> int | None:
    size = value.shape[-1] if value is not None and value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else None


def _scalar(value: onnx_ir.Value | None) -> float | None:
    """Return a constant number; one of more dimensions could give the sum more than the norm has."""
    return number_of(value) if value is not None and value.shape is not None and len(value.shape) < 2 else None


def _over_the_last(reduction: onnx_ir.Node) -> bool:
    source = reduction.inputs[0]
    rank = len(source.shape) if source is not None and source.shape is not None else 0
    axes = axes_of(reduction)
    return keeps_axes(reduction) and axes is not None and len(axes) == 1 and axes[0] in (-1, rank - 1)


def _divided(root: onnx_ir.Node, centred: onnx_ir.Value) -> tuple[onnx_ir.Node, ...] | None:
    """Return the division of x - mean by the root; or the multiplication by the root's reciprocal, and that."""
    reader = only_reader(root.outputs[0])
    if reader is None or reader.graph is not root.graph:
        return None
    if is_op(reader, "Div") and reader.inputs[0] is centred:
        return (reader,)
    if not is_op(reader, "Reciprocal"):
        return None
    product = only_reader(reader.outputs[0])
    if product is None or not is_op(product, "Mul") or other_input(product, reader.outputs[0]) is not centred:
        return None
    return (product, reader)


def _then(node: onnx_ir.Node, op_type: str, size: int) -> tuple[onnx_ir.Node, onnx_ir.Value | None]:
    """Return the following multiplication or addition by a constant vector, and that vector; the node itself where there is
    none.
    """
    after = only_reader(node.outputs[0])
    if after is None or not is_op(after, op_type) or after.graph is not node.graph:
        return node, None
    constant = other_input(after, node.outputs[0])
    array = array_of(constant)
    return (after, constant) if array is not None and array.shape == (size,) else (node, None)


@dataclass(frozen=True)
class _MomentsNorm:
    """(x - m) / sqrt(mean(x * x) - m * m + epsilon) with m = mean(x), over the last axis.

    Attributes:
        inverses: Reciprocals of the root that other nodes read.
        parts: All nodes of the norm but the mean, from the last to the first.
    """

    source: onnx_ir.Value
    size: int
    epsilon: float
    mean: onnx_ir.Node
    quotient: onnx_ir.Node
    inverses: tuple[onnx_ir.Node, ...]
    parts: tuple[onnx_ir.Node, ...]


def _fuse_moments(model: onnx_ir.Model) -> list[Repair]:
    """Fuse layer norms by the mean and the mean of squares, in which float16 cancels; otherwise as `_fuse_layer_norm`.

    Other readers of the mean and of the inverse deviation get the second and third output of LayerNormalization.
    """
    builder, repairs, opset = NodeBuilder(model), list[Repair](), opset_of(model)
    for root in _roots(model):
        norm = _moments_norm_at(root)
        if norm is None:
            continue
        nodes = (norm.mean, *reversed(norm.parts))
        if opset < FIRST_OPSET_WITH_LAYER_NORM:
            repairs += keep(nodes, _offer(opset), FUSE_MOMENTS.name)
            continue
        fused = repair(FUSE_MOMENTS.name, nodes, FUSED)
        _replace_moments(norm, builder)
        repairs.append(fused)
    return repairs


def _moments_norm_at(root: onnx_ir.Node) -> _MomentsNorm | None:
    variance = _variance_at(root)
    after = _after(root, variance[0]) if variance is not None else None
    if variance is None or after is None:
        return None
    mean, epsilon, parts = variance
    quotient, deviation, inverses = after
    source, size = mean.inputs[0], _last_size(mean.inputs[0])
    nodes = (quotient, deviation, *inverses, root, *parts)
    if source is None or source.dtype != FLOAT or size is None or is_kept(mean, *nodes):
        return None
    return _MomentsNorm(source, size, epsilon, mean, quotient, inverses, nodes)


def _variance_at(root: onnx_ir.Node) -> tuple[onnx_ir.Node, float, tuple[onnx_ir.Node, ...]] | None:
    """Return the mean, the epsilon, and the nodes from the addition of the epsilon back to the square."""
    plus = made_for(root, root.inputs[0], "Add")
    if plus is None:
        return None
    variance = next((node for value in plus.inputs if (node := made_for(plus, value, "Sub")) is not None), None)
    epsilon = next((number for number in map(_number, plus.inputs) if number is not None), None)
    if variance is None or epsilon is None or epsilon < 0:
        return None
    mean_square = made_for(variance, variance.inputs[0], "ReduceMean")
    squared_mean = made_for(variance, variance.inputs[1], "Mul", "Pow")
    square = made_for(mean_square, mean_square.inputs[0], "Mul", "Pow") if mean_square is not None else None
    if mean_square is None or squared_mean is None or square is None or not (is_square(square) and is_square(squared_mean)):
        return None
    mean = squared_mean.inputs[0].producer() if squared_mean.inputs[0] is not None else None
    if mean is None or not is_op(mean, "ReduceMean") or mean.graph is not root.graph or mean.inputs[0] is not square.inputs[0]:
        return None
    casts = [maker for value in plus.inputs if value and is_op(maker := value.producer(), "Cast") and maker is not None]
    sound = _over_the_last(mean) and _over_the_last(mean_square)
    return (mean, epsilon, (plus, variance, mean_square, square, squared_mean, *casts)) if sound else None


def _after(root: onnx_ir.Node, mean: onnx_ir.Node) -> tuple[onnx_ir.Node, onnx_ir.Node, tuple[onnx_ir.Node, ...]] | None:
    """Return the division by the root, its numerator, and the reciprocals of the root, if no other node reads the root."""
    found = readers(root.outputs[0])
    inverses = tuple(node for node in found if is_op(node, "Reciprocal"))
    others = [node for node in found if node not in inverses]
    if len(others) != 1 or len(inverses) > 1 or not is_op(others[0], "Div"):
        return None
    if root.outputs[0].is_graph_output() or any(node.graph is not root.graph for node in found):
        return None
    quotient = others[0]
    deviation = made_for(quotient, quotient.inputs[0], "Sub")
    if deviation is None or quotient.inputs[1] is not root.outputs[0]:
        return None
    same = deviation.inputs[0] is mean.inputs[0] and deviation.inputs[1] is mean.outputs[0]
    return (quotient, deviation, inverses) if same else None


def _number(value: onnx_ir.Value | None) -> float | None:
    """Return the number of a scalar, also behind a Cast."""
    maker = value.producer() if value is not None else None
    source = maker.inputs[0] if maker is not None and is_op(maker, "Cast") else value
    scalar = value is not None and value.shape is not None and len(value.shape) <= 1
    return number_of(source) if scalar else None


def _replace_moments(norm: _MomentsNorm, builder: NodeBuilder) -> None:
    mean_read = norm.mean.outputs[0].is_graph_output() or bool(set(readers(norm.mean.outputs[0])) - set(norm.parts))
    count = 3 if norm.inverses else 2 if mean_read else 1
    ones = builder.constant(f"{norm.quotient.name}/ones", np.ones(norm.size))
    made = builder.node("LayerNormalization", [norm.source, ones], norm.mean, outputs=count, axis=-1, epsilon=norm.epsilon)
    take_place(made.outputs[0], norm.quotient.outputs[0])
    for inverse in norm.inverses:
        take_place(made.outputs[2], inverse.outputs[0])
    drop(*norm.parts)
    if mean_read:
        take_place(made.outputs[1], norm.mean.outputs[0])
    drop(norm.mean)


FUSE_LAYER_NORM = RepairPass(
    name="refuse-layer-norm",
    call=_fuse_layer_norm,
    left=lambda model: (root for root in _roots(model) if _norm_at(root) is not None),
)
FUSE_MOMENTS = RepairPass(
    name="refuse-moments",
    call=_fuse_moments,
    left=lambda model: (root for root in _roots(model) if _moments_norm_at(root) is not None),
)
