"""The cube inside of a tanh-GELU: limited to where the tanh is not yet 1."""

from __future__ import annotations

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.repair.edits import Maker, is_kept, is_op, number_of, only_reader, opset_of, other_input
from export.onnx_fp16.repair.fragile_chains import power_of
from export.onnx_fp16.report import Repair

# 40 cubed is 64,000, float16's end; tanh(0.8 * (x + 0.045 * x**3)) is 1 in float32 from x = 5 on.
LIMIT = 32.0
CUBIC = 0.044715  # of the tanh approximation: https://arxiv.org/abs/1606.08415
STEPS = ("Mul", "Add", "Mul", "Tanh")


class LimitGelu:
    """x**3 overflows float16 from 40 on, and infinity minus infinity is no number. The tanh behind needs no more than 5."""

    name = "limit-gelu"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Put a Clip in front of every such cube."""
        maker, repairs = Maker(model), []
        for cube in [node for node in all_nodes(model) if _is_unlimited(node)]:
            clip = _clip(cube, maker, opset_of(model))
            cube.replace_input_with(0, clip.outputs[0])
            repairs.append(
                Repair(pass_name=self.name, nodes=(cube.name or "",), text=f"the cube of at most {LIMIT:g}; its tanh is 1")
            )
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """Every such cube is limited."""
        for node in all_nodes(model):
            if _is_unlimited(node):
                raise ValueError(f"{node.name} is not limited")


def _clip(cube: onnx_ir.Node, maker: Maker, opset: int) -> onnx_ir.Node:
    if opset < 11:  # the bounds were attributes
        return maker.node("Clip", [cube.inputs[0]], cube, min=-LIMIT, max=LIMIT)
    bounds = [maker.constant(f"{cube.name}/limit", np.array(bound)) for bound in (-LIMIT, LIMIT)]
    return maker.node("Clip", [cube.inputs[0], *bounds], cube)


def _is_unlimited(cube: onnx_ir.Node) -> bool:
    if power_of(cube) != 3 or cube.inputs[0] is None or is_kept(cube):
        return False
    maker = cube.inputs[0].producer()
    return not is_op(maker, "Clip") and _leads_to_tanh(cube)


def _leads_to_tanh(cube: onnx_ir.Node) -> bool:
    value = cube.outputs[0]
    for step in STEPS:
        node = only_reader(value)
        if node is None or not is_op(node, step) or node.graph is not cube.graph:
            return False
        if value is cube.outputs[0] and not np.isclose(number_of(other_input(node, value)) or 0.0, CUBIC, rtol=1e-2):
            return False
        value = node.outputs[0]
    return True
