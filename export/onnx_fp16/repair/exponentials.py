"""Exponentials and cubes in parts become Softmax, LogSoftmax and Softplus, or are limited: exp(12) is beyond float16.

SiLU is the other way round: its parts lose less on CUDA than its fused kernel.
"""

from __future__ import annotations

import numpy as np
import onnx_ir

from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import all_nodes
from halfserve.export.onnx_fp16.repair.edits import (
    NodeBuilder,
    RepairPass,
    array_of,
    axes_of,
    drop,
    is_kept,
    is_op,
    keeps_axes,
    made_for,
    number_of,
    only_reader,
    opset_of,
    other_input,
    repair,
    take_place,
)
from halfserve.export.onnx_fp16.repair.fragile_chains import power_of

FIRST_OPSET_OF_BROADCASTS = 7
FIRST_OPSET_OF_ONE_AXIS = 13  # before, Softmax and LogSoftmax ran over all axes from the given one on
# 40 cubed is 64,000, float16's end; tanh(0.8 * (x + 0.045 * x**3)) is 1 in float32 from x = 5 on.
GELU_LIMIT = 32.0
GELU_CUBIC = 0.044715  # of the tanh approximation: https://arxiv.org/abs/1606.08415
_BEHIND_CUBE = ("Mul", "Add", "Mul", "Tanh")


def _fuse_softmax(model: onnx_ir.Model) -> list[Repair]:
    """Fuse exp(x) / sum(exp(x)), also with x - max(x), over one axis into Softmax, which subtracts the largest number."""
    builder, repairs = NodeBuilder(model), []
    for quotient in _softmaxes(model):
        power, total = (value.producer() for value in quotient.inputs if value is not None)
        if power is None or total is None:
            continue
        (axis,) = axes_of(total) or [-1]
        source, parts = _without_maximum(power, axis)
        made = builder.node("Softmax", [source], quotient, axis=axis)
        take_place(made.outputs[0], quotient.outputs[0])
        drop(quotient, total, power, *parts)
        repairs.append(repair(FUSE_SOFTMAX.name, (*parts, power, total, quotient), f"one Softmax over axis {axis}"))
    return repairs


def _softmaxes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    if opset_of(model) < FIRST_OPSET_OF_ONE_AXIS:
        return []
    return [node for node in all_nodes(model) if is_op(node, "Div") and _is_softmax(node)]


def _is_softmax(quotient: onnx_ir.Node) -> bool:
    numerator, denominator = quotient.inputs
    power = numerator.producer() if numerator is not None else None
    total = denominator.producer() if denominator is not None else None
    if numerator is None or denominator is None or power is None or total is None:
        return False
    if not is_op(power, "Exp") or not is_op(total, "ReduceSum") or total.inputs[0] is not numerator:
        return False
    axes = axes_of(total)
    return (
        not is_kept(quotient, total, power)
        and axes is not None
        and len(axes) == 1
        and keeps_axes(total)
        and {use.node for use in numerator.uses()} == {total, quotient}
        and not numerator.is_graph_output()
        and power.graph is total.graph is quotient.graph
        and only_reader(denominator) is quotient
    )


def _without_maximum(power: onnx_ir.Node, axis: int) -> tuple[onnx_ir.Value | None, tuple[onnx_ir.Node, ...]]:
    """Return the argument of the exponential without the maximum over the axis that the model subtracts, and the nodes left
    out.
    """
    argument = power.inputs[0]
    shift = argument.producer() if argument is not None else None
    if shift is None or not is_op(shift, "Sub") or argument is None or only_reader(argument) is not power:
        return argument, ()
    source, largest = shift.inputs
    maximum = largest.producer() if largest is not None else None
    if maximum is None or not is_op(maximum, "ReduceMax") or maximum.inputs[0] is not source or axes_of(maximum) != [axis]:
        return argument, ()
    return (source, (maximum, shift)) if keeps_axes(maximum) and not is_kept(maximum, shift) else (argument, ())


def _fuse_log_softmax(model: onnx_ir.Model) -> list[Repair]:
    """Fuse x - log(sum(exp(x))) over one axis into LogSoftmax, whose sum is float32."""
    builder, repairs = NodeBuilder(model), []
    for difference in _log_softmaxes(model):
        parts = _log_softmax_parts(difference)
        if parts is None:
            continue
        _, total, _ = parts
        (axis,) = axes_of(total) or [-1]
        made = builder.node("LogSoftmax", [difference.inputs[0]], difference, axis=axis)
        take_place(made.outputs[0], difference.outputs[0])
        drop(difference, *parts)
        repairs.append(repair(FUSE_LOG_SOFTMAX.name, (*reversed(parts), difference), f"one LogSoftmax over axis {axis}"))
    return repairs


def _log_softmaxes(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    if opset_of(model) < FIRST_OPSET_OF_ONE_AXIS:
        return []
    return [node for node in all_nodes(model) if is_op(node, "Sub") and _log_softmax_parts(node) is not None]


def _log_softmax_parts(difference: onnx_ir.Node) -> tuple[onnx_ir.Node, onnx_ir.Node, onnx_ir.Node] | None:
    """Return the logarithm, the sum and the exponential, where only this difference reads them."""
    logarithm = made_for(difference, difference.inputs[1], "Log")
    total = made_for(logarithm, logarithm.inputs[0], "ReduceSum") if logarithm is not None else None
    power = made_for(total, total.inputs[0], "Exp") if total is not None else None
    if logarithm is None or total is None or power is None or power.inputs[0] is not difference.inputs[0]:
        return None
    axes = axes_of(total)
    if axes is None or len(axes) != 1 or not keeps_axes(total) or is_kept(difference, logarithm, total, power):
        return None
    return logarithm, total, power


def _fuse_softplus(model: onnx_ir.Model) -> list[Repair]:
    """Fuse log(1 + exp(x)) into Softplus: Softplus of 12 is 12."""
    builder, repairs = NodeBuilder(model), []
    for logarithm in list(all_nodes(model)):
        parts = _softplus_parts(logarithm)
        if parts is None:
            continue
        power, total = parts
        made = builder.node("Softplus", [power.inputs[0]], logarithm)
        take_place(made.outputs[0], logarithm.outputs[0])
        drop(logarithm, total, power)
        text = "one Softplus, which no exponential overflows"
        repairs.append(repair(FUSE_SOFTPLUS.name, (power, total, logarithm), text))
    return repairs


def _softplus_parts(logarithm: onnx_ir.Node) -> tuple[onnx_ir.Node, onnx_ir.Node] | None:
    """Return the exponential and the addition, where only this logarithm reads them."""
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


def _limit_gelu(model: onnx_ir.Model) -> list[Repair]:
    """Clip the base of a tanh-GELU's cube: it overflows from 40 on, and the tanh behind is 1 from 5 on."""
    builder, repairs = NodeBuilder(model), []
    for cube in [node for node in all_nodes(model) if _is_unlimited(node)]:
        if opset_of(model) < 11:  # the bounds were attributes
            clip = builder.node("Clip", [cube.inputs[0]], cube, min=-GELU_LIMIT, max=GELU_LIMIT)
        else:
            bounds = [builder.constant(f"{cube.name}/limit", np.array(bound)) for bound in (-GELU_LIMIT, GELU_LIMIT)]
            clip = builder.node("Clip", [cube.inputs[0], *bounds], cube)
        cube.replace_input_with(0, clip.outputs[0])
        repairs.append(repair(LIMIT_GELU.name, [cube], f"the cube of at most {GELU_LIMIT:g}; its tanh is 1"))
    return repairs


def _is_unlimited(cube: onnx_ir.Node) -> bool:
    if power_of(cube) != 3 or cube.inputs[0] is None or is_kept(cube):
        return False
    return not is_op(cube.inputs[0].producer(), "Clip") and _leads_to_tanh(cube)


def _leads_to_tanh(cube: onnx_ir.Node) -> bool:
    value = cube.outputs[0]
    for op_type in _BEHIND_CUBE:
        node = only_reader(value)
        if node is None or not is_op(node, op_type) or node.graph is not cube.graph:
            return False
        if value is cube.outputs[0] and not np.isclose(number_of(other_input(node, value)) or 0.0, GELU_CUBIC, rtol=1e-2):
            return False
        value = node.outputs[0]
    return True


def _spell_out_silu(model: onnx_ir.Model) -> list[Repair]:
    """Write x * Sigmoid(x) as x / (1 + exp(-x)), whose steps lose nothing to a difference of two numbers near 1.

    CUDA's kernels of Sigmoid and of QuickGelu, to which ONNX Runtime fuses SiLU, subtract such numbers in the half type below 0
    (see `verification.cuda_steps`): the largest error there is 3.7e-3 in float16 and 2.1e-2 in bfloat16, and 2.9e-4 and 1.8e-3
    behind this repair, where one rounding per node made 2.4e-4 and 1.7e-3. An exponential that overflows makes the quotient 0,
    for a result of less than 1.8e-4 in magnitude. ONNX Runtime fuses none of the parts, and OpenVINO fuses them to Swish.
    """
    builder, repairs = NodeBuilder(model), []
    for product in _silus(model):
        sigmoid = _sigmoid_of(product)
        if sigmoid is None:
            continue
        x = sigmoid.inputs[0]
        one = builder.constant(f"{product.name}/one", np.array(1.0))
        power = builder.node("Exp", builder.node("Neg", [x], product).outputs, product)
        total = builder.node("Add", [power.outputs[0], one], product)
        quotient = builder.node("Div", [x, total.outputs[0]], product)
        take_place(quotient.outputs[0], product.outputs[0])
        drop(product, sigmoid)
        repairs.append(repair(SPELL_OUT_SILU.name, (sigmoid, product), "x / (1 + exp(-x)), which CUDA does not fuse"))
    return repairs


def _silus(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    if opset_of(model) < FIRST_OPSET_OF_BROADCASTS:
        return []
    return [node for node in all_nodes(model) if is_op(node, "Mul") and _sigmoid_of(node) is not None]


def _sigmoid_of(product: onnx_ir.Node) -> onnx_ir.Node | None:
    """Return the Sigmoid of the product's other operand, where only this product reads it."""
    for x, value in (product.inputs, product.inputs[::-1]):
        sigmoid = made_for(product, value, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is x and not is_kept(product, sigmoid):
            return sigmoid
    return None


FUSE_SOFTMAX = RepairPass(name="refuse-softmax", call=_fuse_softmax, left=_softmaxes)
FUSE_LOG_SOFTMAX = RepairPass(name="refuse-log-softmax", call=_fuse_log_softmax, left=_log_softmaxes)
FUSE_SOFTPLUS = RepairPass(
    name="refuse-softplus",
    call=_fuse_softplus,
    left=lambda model: (node for node in all_nodes(model) if _softplus_parts(node) is not None),
)
LIMIT_GELU = RepairPass(
    name="limit-gelu",
    call=_limit_gelu,
    left=lambda model: (node for node in all_nodes(model) if _is_unlimited(node)),
)
SPELL_OUT_SILU = RepairPass(name="spell-out-silu", call=_spell_out_silu, left=_silus)
