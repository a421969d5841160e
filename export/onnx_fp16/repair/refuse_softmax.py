"""A Softmax in parts becomes one operator, which takes the largest number off first."""

from __future__ import annotations

import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.repair.edits import Maker, axes_of, drop, is_kept, is_op, keeps_axes, only_reader, opset_of, take_place
from export.onnx_fp16.report import Repair

FIRST_OPSET = 13  # before, Softmax ran over all axes from its own on


class RefuseSoftmax:
    """exp(x) / sum(exp(x)), also with x - max(x), over one axis: exp(12) is beyond float16, Softmax of 12 is not."""

    name = "refuse-softmax"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Fuse what is a Softmax."""
        maker, repairs = Maker(model), []
        for quotient in _softmaxes(model):
            power, total = (value.producer() for value in quotient.inputs if value is not None)
            if power is None or total is None:
                continue
            (axis,) = axes_of(total) or [-1]
            source, parts = _shifted(power, axis)
            made = maker.node("Softmax", [source], quotient, axis=axis)
            take_place(made.outputs[0], quotient.outputs[0])
            drop(quotient, total, power, *parts)
            names = tuple(node.name or "" for node in (*parts, power, total, quotient))
            repairs.append(Repair(pass_name=self.name, nodes=names, text=f"one Softmax over axis {axis}"))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """No such parts are left."""
        if left := _softmaxes(model):
            raise ValueError(f"the softmax at {left[0].name} was not fused")


def _softmaxes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    return (
        [node for node in all_nodes(model) if is_op(node, "Div") and _is_softmax(node)]
        if opset_of(model) >= FIRST_OPSET
        else []
    )


def _is_softmax(quotient: onnx_ir.Node) -> bool:
    numerator, denominator = quotient.inputs
    power = numerator.producer() if numerator is not None else None
    total = denominator.producer() if denominator is not None else None
    if numerator is None or denominator is None or power is None or total is None:
        return False
    if not is_op(power, "Exp") or not is_op(total, "ReduceSum") or total.inputs[0] is not numerator:
        return False
    if is_kept(quotient, total, power):
        return False
    axes = axes_of(total)
    alone = {use.node for use in numerator.uses()} == {total, quotient} and not numerator.is_graph_output()
    together = power.graph is total.graph is quotient.graph
    return (
        axes is not None
        and len(axes) == 1
        and keeps_axes(total)
        and alone
        and together
        and only_reader(denominator) is quotient
    )


def _shifted(power: onnx_ir.Node, axis: int) -> tuple[onnx_ir.Value | None, tuple[onnx_ir.Node, ...]]:
    """What is exponentiated, without the largest number that the model takes off by itself over the same axis."""
    argument = power.inputs[0]
    shift = argument.producer() if argument is not None else None
    if shift is None or not is_op(shift, "Sub") or argument is None or only_reader(argument) is not power:
        return argument, ()
    source, largest = shift.inputs
    maximum = largest.producer() if largest is not None else None
    if maximum is None or not is_op(maximum, "ReduceMax") or maximum.inputs[0] is not source or axes_of(maximum) != [axis]:
        return argument, ()
    return (source, (maximum, shift)) if keeps_axes(maximum) and not is_kept(maximum, shift) else (argument, ())
