"""Operators that ONNX Runtime's CUDA provider has no kernel for become others that it has one for, with the same results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir

from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import all_nodes, is_float
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
_BATCH_AND_CHANNELS = 2  # axes before those that a pool reduces


@dataclass(frozen=True)
class _Window:
    """A pool's window along one axis: size, distance between windows, distance inside, and elements to add at both ends."""

    axis: int
    size: int
    stride: int
    dilation: int
    before: int
    behind: int

    @property
    def reach(self) -> int:
        """Distance between a window's first and last element."""
        return (self.size - 1) * self.dilation

    @property
    def holds_an_end(self) -> bool:
        """Whether every window that reaches over an end of the axis holds the last element before it."""
        return self.behind <= self.reach and (self.dilation == 1 or not (self.before or self.behind))


def has_form_for_cuda(node: onnx_ir.Node) -> bool:
    """Whether a repair writes an operator without a kernel at a later opset by others."""
    return _windows(node) is not None


def bound_to_kernel(nodes: Iterable[onnx_ir.Node], *, repair: bool) -> set[str]:
    """ONNX's own operators that a later opset without a kernel for them leaves to the CPU, with or without repairs."""
    return {node.op_type for node in nodes if not node.domain and not (repair and has_form_for_cuda(node))}


def _windows(node: onnx_ir.Node) -> list[_Window] | None:
    """The windows of a MaxPool that slices can express; None for any other node.

    Padding is negative infinity. The element at the end of the axis does as well, if it is in every window that holds padding.
    """
    if not is_op(node, "MaxPool") or is_kept(node) or any(output.name for output in node.outputs[1:]):
        return None
    sizes = node.attributes.get_ints("kernel_shape", ())
    ones, zeros = [1] * len(sizes), [0] * 2 * len(sizes)
    strides, dilations = node.attributes.get_ints("strides", ones), node.attributes.get_ints("dilations", ones)
    pads = node.attributes.get_ints("pads", zeros)
    way = node.attributes.get_string("auto_pad", "NOTSET")
    rounds_up = node.attributes.get_int("ceil_mode", 0) == 1
    if way != "NOTSET" and (way != "VALID" or rounds_up):
        return None
    windows = [
        _Window(
            axis=_BATCH_AND_CHANNELS + at,
            size=size,
            stride=strides[at],
            dilation=dilations[at],
            before=pads[at] if way == "NOTSET" else 0,
            behind=(pads[len(sizes) + at] if way == "NOTSET" else 0) + (strides[at] - 1 if rounds_up else 0),
        )
        for at, size in enumerate(sizes)
    ]
    return windows if windows and all(window.holds_an_end for window in windows) else None


def spell_out_max_pools(model: onnx_ir.Model) -> list[Repair]:
    """Write MaxPool of opset 22 as maxima of slices, one axis after the other."""
    slicer, repairs = _Slicer(NodeBuilder(model)), list[Repair]()
    for node in list(_left(model)):
        value = node.inputs[0]
        for window in _windows(node) or ():
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
        yield from (node for node in all_nodes(model) if has_form_for_cuda(node) and is_float(node.inputs[0]))


class _Slicer:
    """Makes slices in the place of a node; equal bounds are one constant."""

    def __init__(self, builder: NodeBuilder) -> None:
        self._builder = builder
        self._bounds: dict[int, onnx_ir.Value] = {}

    def largest(self, node: onnx_ir.Node, value: onnx_ir.Value | None, window: _Window) -> onnx_ir.Value:
        """The largest element of each window along one axis."""
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
