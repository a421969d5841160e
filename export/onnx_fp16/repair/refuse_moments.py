"""A LayerNorm by the mean and the mean of squares becomes one operator: the squares sum up in float32, and nothing cancels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import FLOAT, all_nodes
from export.onnx_fp16.repair.edits import (
    Maker,
    axes_of,
    drop,
    is_kept,
    is_op,
    keep,
    keeps_axes,
    made_for,
    number_of,
    opset_of,
    readers,
    take_place,
)
from export.onnx_fp16.repair.fragile_chains import power_of
from export.onnx_fp16.report import Repair
from export.onnx_fp16.upgrade_opset import FIRST_OPSET_WITH_LAYER_NORM, offer


@dataclass(frozen=True)
class _Norm:
    """(x - m) / sqrt(mean(x * x) - m * m + epsilon) with m = mean(x), over the last axis.

    Attributes:
        inverses: Reciprocals of the root that others read.
        parts: All nodes that it is made of but the mean, from the last to the first.
    """

    source: onnx_ir.Value
    size: int
    epsilon: float
    mean: onnx_ir.Node
    quotient: onnx_ir.Node
    inverses: tuple[onnx_ir.Node, ...]
    parts: tuple[onnx_ir.Node, ...]


class RefuseMoments:
    """Finds the parts from the square root on; the mean and the inverse deviation go on to whoever else reads them."""

    name = "refuse-moments"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Fuse what is a LayerNorm; below opset 17, which has no such operator, keep it in float32, and say what to do."""
        maker, repairs, opset = Maker(model), list[Repair](), opset_of(model)
        for root in _roots(model):
            norm = _norm_at(root)
            if norm is None:
                continue
            if opset < FIRST_OPSET_WITH_LAYER_NORM:
                repairs += keep((norm.mean, *reversed(norm.parts)), offer(opset), self.name)
                continue
            _replace(norm, maker)
            names = tuple(node.name or "" for node in (norm.mean, *reversed(norm.parts)))
            repairs.append(Repair(pass_name=self.name, nodes=names, text="one LayerNormalization, which sums in float32"))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """No such parts are left that are not kept."""
        for root in _roots(model):
            if _norm_at(root) is not None:
                raise ValueError(f"the norm at {root.name} was not fused")


def _roots(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    return [node for node in all_nodes(model) if is_op(node, "Sqrt")]


def _norm_at(root: onnx_ir.Node) -> _Norm | None:
    variance = _variance_at(root)
    after = _after(root, variance[0]) if variance is not None else None
    if variance is None or after is None:
        return None
    mean, epsilon, parts = variance
    quotient, deviation, inverses = after
    source = mean.inputs[0]
    size = source.shape[-1] if source is not None and source.shape is not None and len(source.shape) else None
    nodes = (quotient, deviation, *inverses, root, *parts)
    if source is None or source.dtype != FLOAT or not isinstance(size, int) or is_kept(mean, *nodes):
        return None
    return _Norm(source, size, epsilon, mean, quotient, inverses, nodes)


def _variance_at(root: onnx_ir.Node) -> tuple[onnx_ir.Node, float, tuple[onnx_ir.Node, ...]] | None:
    """The mean, the epsilon, and the nodes from the addition of the epsilon back to the square."""
    plus = made_for(root, root.inputs[0], "Add")
    if plus is None:
        return None
    variance = next((node for value in plus.inputs if (node := made_for(plus, value, "Sub")) is not None), None)
    epsilon = next((number for number in map(_number, plus.inputs) if number is not None), None)
    if variance is None or epsilon is None or epsilon < 0:
        return None
    squares = made_for(variance, variance.inputs[0], "ReduceMean")
    squared_mean = made_for(variance, variance.inputs[1], "Mul", "Pow")
    square = made_for(squares, squares.inputs[0], "Mul", "Pow") if squares is not None else None
    if squares is None or squared_mean is None or square is None or not (_squares(square) and _squares(squared_mean)):
        return None
    mean = squared_mean.inputs[0].producer() if squared_mean.inputs[0] is not None else None
    if mean is None or not is_op(mean, "ReduceMean") or mean.graph is not root.graph or mean.inputs[0] is not square.inputs[0]:
        return None
    sound = _over_the_last(mean) and _over_the_last(squares)
    casts = [maker for value in plus.inputs if value and is_op(maker := value.producer(), "Cast") and maker is not None]
    return (mean, epsilon, (plus, variance, squares, square, squared_mean, *casts)) if sound else None


def _after(root: onnx_ir.Node, mean: onnx_ir.Node) -> tuple[onnx_ir.Node, onnx_ir.Node, tuple[onnx_ir.Node, ...]] | None:
    """The division by the root, what it divides, and the reciprocals of the root, if nothing else reads that."""
    if root.outputs[0].is_graph_output():
        return None
    found = readers(root.outputs[0])
    inverses = tuple(node for node in found if is_op(node, "Reciprocal"))
    others = [node for node in found if node not in inverses]
    if (
        len(others) != 1
        or len(inverses) > 1
        or not is_op(others[0], "Div")
        or any(node.graph is not root.graph for node in found)
    ):
        return None
    quotient = others[0]
    deviation = made_for(quotient, quotient.inputs[0], "Sub")
    if deviation is None or quotient.inputs[1] is not root.outputs[0]:
        return None
    same = deviation.inputs[0] is mean.inputs[0] and deviation.inputs[1] is mean.outputs[0]
    return (quotient, deviation, inverses) if same else None


def _number(value: onnx_ir.Value | None) -> float | None:
    """The number of a scalar, also behind a Cast."""
    maker = value.producer() if value is not None else None
    source = maker.inputs[0] if maker is not None and is_op(maker, "Cast") else value
    scalar = value is not None and value.shape is not None and len(value.shape) <= 1
    return number_of(source) if scalar else None


def _squares(node: onnx_ir.Node) -> bool:
    return node.inputs[0] is node.inputs[1] if is_op(node, "Mul") else power_of(node) == 2


def _over_the_last(reduction: onnx_ir.Node) -> bool:
    source = reduction.inputs[0]
    rank = len(source.shape) if source is not None and source.shape is not None else 0
    axes = axes_of(reduction)
    return keeps_axes(reduction) and axes is not None and len(axes) == 1 and axes[0] in (-1, rank - 1)


def _replace(norm: _Norm, maker: Maker) -> None:
    mean_read = norm.mean.outputs[0].is_graph_output() or bool(set(readers(norm.mean.outputs[0])) - set(norm.parts))
    count = 3 if norm.inverses else 2 if mean_read else 1
    ones = maker.constant(f"{norm.quotient.name}/ones", np.ones(norm.size))
    made = maker.node("LayerNormalization", [norm.source, ones], norm.mean, outputs=count, axis=-1, epsilon=norm.epsilon)
    take_place(made.outputs[0], norm.quotient.outputs[0])
    for inverse in norm.inverses:
        take_place(made.outputs[2], inverse.outputs[0])
    drop(*norm.parts)
    if mean_read:
        take_place(made.outputs[1], norm.mean.outputs[0])
    drop(norm.mean)
