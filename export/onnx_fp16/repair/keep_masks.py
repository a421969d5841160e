"""Marks masks each of whose numbers float16 holds, and whose sum or product it does not, up to where it does again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import FLOAT, all_nodes
from export.onnx_fp16.planning.op_sets import MOVERS
from export.onnx_fp16.repair.edits import array_of, is_kept, is_op, keep
from export.onnx_fp16.repair.soften_masks import SOFTMAX
from export.onnx_fp16.report import Repair
from export.weight_ledger import FP16_MAX, FP16_OVERFLOW

REASON = "masks that together outgrow float16"
THROUGH = frozenset({"Add", "Cast", "Div", "Mul", "Neg", "Sub", "Where"}) | MOVERS
A_MASK = 1024.0  # smaller numbers are biases and the ones of 1 - mask, of which none hides anything
MOST_NODES = 64  # before a Softmax


class KeepMasks:
    """Finds (1 - m) * -30000 * 8, and -60000 that is added twice.

    Where such a mask hides a whole row, all of it is -infinity in float16, and the Softmax gives NaN; in float32 it is finite.
    A single number over float16's range is `SoftenMasks`' concern, or becomes the nearest that float16 has.
    """

    name = "keep-masks"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Mark nodes; the graph stays as it is."""
        repairs: list[Repair] = []
        for softmax in all_nodes(model):
            if is_op(softmax, *SOFTMAX) and softmax.inputs[0] is not None and softmax.inputs[0].dtype == FLOAT:
                repairs += keep(_outgrowing(softmax), REASON, self.name)
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """Nothing: what is marked changes no number."""


def _outgrowing(softmax: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """The nodes that take or give a mask over float16's range, the Softmax included."""
    sizes: dict[onnx_ir.Value | None, float] = {}
    for node in _in_order(softmax):
        inputs = [_constant_size(node, value) if value not in sizes else sizes[value] for value in node.inputs]
        size = 0.0 if node is softmax else _size(node, inputs)
        sizes[node.outputs[0]] = size
        if max(size, *inputs) >= FP16_OVERFLOW:
            yield node


def _in_order(softmax: onnx_ir.Node) -> list[onnx_ir.Node]:
    """What computes a Softmax's masks, each node after those that it reads, and the Softmax last."""
    order: dict[onnx_ir.Node, None] = {}
    waiting, seen = [(softmax, False)], {softmax}
    while waiting:
        node, done = waiting.pop()
        if done:
            order[node] = None
            continue
        waiting.append((node, True))
        for value in node.inputs:
            maker = value.producer() if value is not None and value.dtype == FLOAT else None
            if maker is not None and maker not in seen and len(seen) < MOST_NODES and _is_passed(maker):
                seen.add(maker)
                waiting.append((maker, False))
    return list(order)


def _is_passed(node: onnx_ir.Node) -> bool:
    """Not the choice that `SoftenMasks` ends with: it replaces what has outgrown float16."""
    return is_op(node, *THROUGH) and not (is_op(node, "Where") and is_op(_maker(node.inputs[0]), "Less"))


def _size(node: onnx_ir.Node, inputs: list[float]) -> float:
    """The largest magnitude that masks alone give; 0 where there is none."""
    if is_op(node, "Mul"):
        return inputs[0] * inputs[1]
    if is_op(node, "Div"):
        array = array_of(node.inputs[1])
        return 0.0 if array is None or not array.all() else inputs[0] / float(np.abs(array).min(initial=np.inf))
    if is_op(node, "Add", "Sub"):
        return sum(inputs) if min(inputs) >= A_MASK else max(inputs)
    return max(inputs[1:] if is_op(node, "Where") else inputs[: None if is_op(node, "Concat") else 1])


def _constant_size(node: onnx_ir.Node, value: onnx_ir.Value | None) -> float:
    """Of what is no mask computed before: a constant's largest number, 1 for integers and booleans, 0 for scores."""
    if value is None:
        return 0.0
    if value.dtype is not None and value.dtype != FLOAT:
        return 1.0
    array = array_of(value)
    if array is None:
        return 0.0
    largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
    return largest if is_kept(node) else min(largest, FP16_MAX)


def _maker(value: onnx_ir.Value | None) -> onnx_ir.Node | None:
    return value.producer() if value is not None else None
