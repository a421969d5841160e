"""Operators that ONNX Runtime's CUDA provider has no kernel for become others that it has one for, with the same results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir

from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import all_nodes, is_float
from halfserve.export.onnx_fp16.pool_windows import PoolWindow, pool_windows
from halfserve.export.onnx_fp16.repair.edits import (
    NodeBuilder,
    RepairPass,
    drop,
    is_kept,
    is_op,
    opset_of,
    repair,
    take_place,
)

FIRST_OPSET_WITHOUT_MAX_POOL = 22
FIRST_OPSET_WITH_BFLOAT16_MAX = 13
_END = np.iinfo(np.int64).max


def spell_out_max_pools(model: onnx_ir.Model) -> list[Repair]:
    """Write MaxPool of opset 22 as maxima of slices, one axis after the other."""
    slicer, repairs = _Slicer(NodeBuilder(model)), list[Repair]()
    for node in list(_left(model)):
        value = node.inputs[0]
        for window in pool_windows(node) or ():
            value = slicer.largest(node, value, window)
        if value is None:
            raise ValueError(node.name)
        take_place(value, node.outputs[0])
        text = "maxima of slices: ONNX Runtime's CUDA provider has no kernel for MaxPool of opset 22"
        repairs.append(repair(SPELL_OUT_MAX_POOL.name, [node], text))
        drop(node)
    return repairs


def _left(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    if opset_of(model) >= FIRST_OPSET_WITHOUT_MAX_POOL:
        yield from (node for node in all_nodes(model) if pool_windows(node) and is_float(node.inputs[0]) and not is_kept(node))


class _Slicer:
    """Makes slices in the place of a node; equal bounds are one constant."""

    def __init__(self, builder: NodeBuilder) -> None:
        self._builder = builder
        self._bounds: dict[int, onnx_ir.Value] = {}

    def largest(self, node: onnx_ir.Node, value: onnx_ir.Value | None, window: PoolWindow) -> onnx_ir.Value:
        """Return the largest element of each window along one axis."""
        if window.before or window.behind:
            first = self._slice(node, value, window.axis, 0, 1, 1)
            last = self._slice(node, value, window.axis, -1, _END, 1)
            parts = [*[first] * window.before, value, *[last] * window.behind]
            value = self._builder.node("Concat", parts, node, axis=window.axis).outputs[0]
        starts = range(0, window.reach + 1, window.dilation)
        # The end counts backwards: all slices have as many elements.
        slices = [self._slice(node, value, window.axis, at, at - window.reach or _END, window.stride) for at in starts]
        return slices[0] if len(slices) == 1 else self._builder.node("Max", slices, node).outputs[0]

    def _slice(
        self, node: onnx_ir.Node, value: onnx_ir.Value | None, axis: int, start: int, end: int, step: int
    ) -> onnx_ir.Value:
        for number in (start, end, axis, step):
            if number not in self._bounds:
                self._bounds[number] = self._builder.constant("slice", np.array([number], np.int64))
        bounds = [self._bounds[number] for number in (start, end, axis, step)]
        return self._builder.node("Slice", [value, *bounds], node).outputs[0]


def _clips(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    if opset_of(model) < FIRST_OPSET_WITH_BFLOAT16_MAX:
        return []
    return [node for node in all_nodes(model) if is_op(node, "Clip") and is_float(node.inputs[0]) and not is_kept(node)]


def _spell_out_clips(model: onnx_ir.Model) -> list[Repair]:
    """Write Clip, which has no bfloat16 kernel, as Max and Min, which have one."""
    builder, repairs = NodeBuilder(model), list[Repair]()
    for node in _clips(model):
        value = node.inputs[0]
        for op_type, bound in zip(("Max", "Min"), node.inputs[1:], strict=False):
            if bound is not None:
                value = builder.node(op_type, [value, bound], node).outputs[0]
        if value is None or value is node.inputs[0]:
            value = builder.node("Identity", [value], node).outputs[0]
        take_place(value, node.outputs[0])
        drop(node)
        text = "Max and Min: ONNX Runtime's CUDA provider has no bfloat16 kernel for Clip"
        repairs.append(repair(SPELL_OUT_CLIP.name, [node], text))
    return repairs


SPELL_OUT_MAX_POOL = RepairPass(name="spell-out-max-pool", call=spell_out_max_pools, left=_left)
SPELL_OUT_CLIP = RepairPass(name="spell-out-clip", call=_spell_out_clips, left=_clips)
