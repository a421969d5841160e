"""A LayerNorm in parts becomes one operator, which sums in float32 whatever its type is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.repair.edits import (
    Maker,
    array_of,
    axes_of,
    drop,
    is_kept,
    is_op,
    keep,
    keeps_axes,
    number_of,
    only_reader,
    opset_of,
    other_input,
    take_place,
)
from export.onnx_fp16.repair.fragile_chains import power_of, squares
from export.onnx_fp16.report import Repair
from export.onnx_fp16.upgrade_opset import FIRST_OPSET_WITH_LAYER_NORM, offer


@dataclass(frozen=True)
class _Norm:
    """The parts of one norm: (x - mean) / sqrt(mean((x - mean)**2) + epsilon) * scale + bias over the last axis."""

    source: onnx_ir.Value
    size: int
    epsilon: float
    scale: onnx_ir.Value | None
    bias: onnx_ir.Value | None
    last: onnx_ir.Node
    parts: tuple[onnx_ir.Node, ...]


class RefuseLayerNorm:
    """Finds the parts from the square root back to the mean, and puts LayerNormalization in their place."""

    name = "refuse-layer-norm"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Fuse what is a LayerNorm; below opset 17, which has no such operator, keep it in float32, and say what to do."""
        maker, repairs, opset = Maker(model), list[Repair](), opset_of(model)
        for root in [node for node in all_nodes(model) if is_op(node, "Sqrt")]:
            norm = _norm_at(root)
            if norm is None:
                continue
            if opset < FIRST_OPSET_WITH_LAYER_NORM:
                repairs += keep(norm.parts, offer(opset), self.name)
                continue
            _replace(norm, maker)
            names = tuple(node.name or "" for node in norm.parts)
            repairs.append(Repair(pass_name=self.name, nodes=names, text="one LayerNormalization, which sums in float32"))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """No such parts are left that are not kept."""
        for node in all_nodes(model):
            if is_op(node, "Sqrt") and _norm_at(node) is not None:
                raise ValueError(f"the norm at {node.name} was not fused")


@dataclass(frozen=True)
class _Centre:
    """The front half of a norm: the mean, what is left without it, and its square's mean with an epsilon, up to the root."""

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
    plus = _made_by(root.inputs[0], "Add", root)
    variance = next((node for value in (plus.inputs if plus else ()) if (node := _made_by(value, "ReduceMean", plus))), None)
    square = variance and (_made_by(variance.inputs[0], "Pow", variance) or _made_by(variance.inputs[0], "Mul", variance))
    centred = square.inputs[0].producer() if square and square.inputs[0] is not None else None
    mean = _made_by(centred.inputs[1], "ReduceMean", centred) if centred is not None and is_op(centred, "Sub") else None
    if plus is None or variance is None or square is None or centred is None or mean is None:
        return None
    source, epsilon = centred.inputs[0], next((number for number in map(_scalar, plus.inputs) if number is not None), None)
    size = source.shape[-1] if source is not None and source.shape is not None and len(source.shape) else None
    same = source is not None and mean.inputs[0] is source and not centred.outputs[0].is_graph_output()
    sound = power_of(square) in (None, 2.0) and squares(square) and _over_the_last(variance) and _over_the_last(mean)
    if source is None or epsilon is None or not isinstance(size, int) or not (same and sound):
        return None
    return _Centre(source, size, epsilon, centred.outputs[0], (mean, centred, square, variance, plus))


def _scalar(value: onnx_ir.Value | None) -> float | None:
    """A constant number; one of more dimensions could give the sum more than the norm has."""
    return number_of(value) if value is not None and value.shape is not None and len(value.shape) < 2 else None


def _made_by(value: onnx_ir.Value | None, op_type: str, reader: onnx_ir.Node | None) -> onnx_ir.Node | None:
    """The maker of a value if it is such an operator of the same graph and `reader` alone reads it."""
    maker = value.producer() if value is not None else None
    if value is None or maker is None or reader is None or not is_op(maker, op_type) or maker.graph is not reader.graph:
        return None
    return maker if only_reader(value) is reader else None


def _over_the_last(reduction: onnx_ir.Node) -> bool:
    source = reduction.inputs[0]
    rank = len(source.shape) if source is not None and source.shape is not None else None
    axes = axes_of(reduction)
    return keeps_axes(reduction) and axes is not None and len(axes) == 1 and axes[0] in (-1, rank - 1 if rank else -1)


def _divided(root: onnx_ir.Node, centred: onnx_ir.Value) -> tuple[onnx_ir.Node, ...] | None:
    """The division of what was centred by the root; or the multiplication by the root's reciprocal, and that."""
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
    """The following multiplication or addition by a constant vector, and that vector; the node itself where there is none."""
    after = only_reader(node.outputs[0])
    if after is None or not is_op(after, op_type) or after.graph is not node.graph:
        return node, None
    constant = other_input(after, node.outputs[0])
    array = array_of(constant)
    return (after, constant) if array is not None and array.shape == (size,) else (node, None)


def _replace(norm: _Norm, maker: Maker) -> None:
    scale = norm.scale or maker.constant(f"{norm.last.name}/ones", np.ones(norm.size))
    inputs = [norm.source, scale, *([norm.bias] if norm.bias is not None else [])]
    made = maker.node("LayerNormalization", inputs, norm.last, axis=-1, epsilon=norm.epsilon)
    take_place(made.outputs[0], norm.last.outputs[0])
    drop(*norm.parts)
