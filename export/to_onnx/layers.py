"""Layers that torch's own translations say wrong: a Conv3d without a bias, and averages with a divisor of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_conv3d
from onnxscript.function_libs.torch_lib.ops.nn import aten_avg_pool2d, aten_avg_pool3d
from onnxscript.onnx_opset import opset18

from export.errors import ExportError

op: Any = opset18  # its annotations are of what it runs at once, not of what it records


def layer_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How these layers are said in ONNX, for `torch.onnx.export`."""
    return {
        torch.ops.aten.conv3d.default: _conv3d,
        torch.ops.aten.avg_pool2d.default: _avg_pool2d,
        torch.ops.aten.avg_pool3d.default: _avg_pool3d,
    }


def _conv3d(x: Any, weight: Any, bias: Any = None, *rest: Any, **named: Any) -> Any:
    if bias is None:  # torch's translation makes one of two axes, which no runtime takes
        channels = op.Shape(weight, start=0, end=1)
        bias = op.Expand(op.Constant(value=onnx_ir.tensor(0.0, dtype=weight.dtype)), channels)
    return aten_conv3d(x, weight, bias, *rest, **named)


def _avg_pool2d(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if divisor_override is None:
        return aten_avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
    return _redivided(aten_avg_pool2d, x, kernel_size, stride, padding, ceil_mode, divisor_override, axes=2)


def _avg_pool3d(
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if divisor_override is None:
        return aten_avg_pool3d(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
    return _redivided(aten_avg_pool3d, x, kernel_size, stride, padding, ceil_mode, divisor_override, axes=3)


def _redivided(
    averaged: Callable[..., Any],
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    divisor: int,
    *,
    axes: int,
) -> Any:
    """The average over whole windows, padding counted, times what it was divided by too much."""
    if ceil_mode:
        raise ExportError("an average with both ceil_mode and divisor_override has no form in ONNX; leave one of the two out")
    window = math.prod(kernel_size) if len(kernel_size) > 1 else kernel_size[0] ** axes
    average = averaged(x, kernel_size, stride, padding, False, True)
    return op.Mul(average, op.Constant(value=onnx_ir.tensor(window / divisor, dtype=x.dtype)))
