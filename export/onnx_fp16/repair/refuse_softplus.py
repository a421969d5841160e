"""log(1 + exp(x)) becomes Softplus: exp(12) is beyond float16, and Softplus of 12 is 12."""

from __future__ import annotations

import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.repair.edits import Maker, array_of, drop, is_kept, is_op, made_for, other_input, take_place
from export.onnx_fp16.report import Repair


class RefuseSoftplus:
    """Finds a logarithm of one plus an exponential."""

    name = "refuse-softplus"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Fuse what is a Softplus."""
        maker, repairs = Maker(model), []
        for logarithm in list(all_nodes(model)):
            parts = _parts(logarithm)
            if parts is None:
                continue
            power, total = parts
            made = maker.node("Softplus", [power.inputs[0]], logarithm)
            take_place(made.outputs[0], logarithm.outputs[0])
            drop(logarithm, total, power)
            names = tuple(node.name or "" for node in (power, total, logarithm))
            repairs.append(Repair(pass_name=self.name, nodes=names, text="one Softplus, which no exponential overflows"))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """No such parts are left."""
        for node in all_nodes(model):
            if _parts(node) is not None:
                raise ValueError(f"the softplus at {node.name} was not fused")


def _parts(logarithm: onnx_ir.Node) -> tuple[onnx_ir.Node, onnx_ir.Node] | None:
    """The exponential and the addition, where they serve this logarithm alone."""
    total = made_for(logarithm, logarithm.inputs[0], "Add") if is_op(logarithm, "Log") else None
    if total is None:
        return None
    power = next((node for value in total.inputs if (node := made_for(total, value, "Exp")) is not None), None)
    if power is None or is_kept(power, total, logarithm):
        return None
    one, shape = array_of(other_input(total, power.outputs[0])), power.outputs[0].shape
    if one is None or one.size != 1 or float(one.reshape(())) != 1 or one.ndim > (len(shape) if shape is not None else 0):
        return None
    return power, total
