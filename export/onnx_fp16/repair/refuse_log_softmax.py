"""x - log(sum(exp(x))) becomes LogSoftmax, whose sum is float32 whatever its type is."""

from __future__ import annotations

import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.repair.edits import Maker, axes_of, drop, is_kept, is_op, keeps_axes, made_for, opset_of, take_place
from export.onnx_fp16.report import Repair

FIRST_OPSET = 13  # before, LogSoftmax ran over all axes from its own on


class RefuseLogSoftmax:
    """Finds a difference to the logarithm of a sum of exponentials over one axis."""

    name = "refuse-log-softmax"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Fuse what is a LogSoftmax."""
        maker, repairs = Maker(model), []
        for difference in _differences(model):
            parts = _parts(difference)
            if parts is None:
                continue
            _, total, _ = parts
            (axis,) = axes_of(total) or [-1]
            made = maker.node("LogSoftmax", [difference.inputs[0]], difference, axis=axis)
            take_place(made.outputs[0], difference.outputs[0])
            drop(difference, *parts)
            names = tuple(node.name or "" for node in (*reversed(parts), difference))
            repairs.append(Repair(pass_name=self.name, nodes=names, text=f"one LogSoftmax over axis {axis}"))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """No such parts are left."""
        if left := _differences(model):
            raise ValueError(f"the logarithm of a softmax at {left[0].name} was not fused")


def _differences(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    if opset_of(model) < FIRST_OPSET:
        return []
    return [node for node in all_nodes(model) if is_op(node, "Sub") and _parts(node) is not None]


def _parts(difference: onnx_ir.Node) -> tuple[onnx_ir.Node, onnx_ir.Node, onnx_ir.Node] | None:
    """The logarithm, the sum and the exponential, where they serve this difference alone."""
    logarithm = made_for(difference, difference.inputs[1], "Log")
    total = made_for(logarithm, logarithm.inputs[0], "ReduceSum") if logarithm is not None else None
    power = made_for(total, total.inputs[0], "Exp") if total is not None else None
    if logarithm is None or total is None or power is None or power.inputs[0] is not difference.inputs[0]:
        return None
    axes = axes_of(total)
    if axes is None or len(axes) != 1 or not keeps_axes(total) or is_kept(difference, logarithm, total, power):
        return None
    return logarithm, total, power
