"""The windows of pools that slices can express, and with that the operators that a repair writes by others for CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir

_BATCH_AND_CHANNELS = 2  # axes before those that a pool reduces


@dataclass(frozen=True)
class PoolWindow:
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


def bound_to_kernel(nodes: Iterable[onnx_ir.Node], *, repair: bool) -> set[str]:
    """ONNX's own operators that a later opset without a kernel for them leaves to the CPU, with or without repairs."""
    return {node.op_type for node in nodes if not node.domain and not (repair and pool_windows(node))}


def pool_windows(node: onnx_ir.Node) -> list[PoolWindow] | None:
    """Return the windows of a MaxPool that slices can express; None for any other node.

    Padding is negative infinity. The element at the end of the axis does as well, if it is in every window that holds padding.
    """
    if node.op_type != "MaxPool" or node.domain or any(output.name for output in node.outputs[1:]):
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
        PoolWindow(
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
