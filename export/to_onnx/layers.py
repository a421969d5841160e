"""Layers that torch's own translations say wrong.

A Conv3d without a bias, averages with a divisor of their own, pictures that are made smaller or larger without aliasing, and
a batch_norm over the batch's own statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten__native_batch_norm_legit_functional, aten_conv3d
from onnxscript.function_libs.torch_lib.ops.nn import (
    aten__upsample_bicubic2d_aa,
    aten__upsample_bilinear2d_aa,
    aten_avg_pool2d,
    aten_avg_pool3d,
)
from onnxscript.onnx_opset import opset18

from export.errors import ExportError

op: Any = opset18  # its annotations are of what it runs at once, not of what it records


def layer_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How these layers are said in ONNX, for `torch.onnx.export`."""
    return {
        torch.ops.aten.conv3d.default: _conv3d,
        torch.ops.aten.avg_pool2d.default: _avg_pool2d,
        torch.ops.aten.avg_pool3d.default: _avg_pool3d,
        torch.ops.aten._native_batch_norm_legit_functional.default: _batch_norm,  # noqa: SLF001  (see below)
        torch.ops.aten._upsample_bicubic2d_aa.default: _bicubic,  # noqa: SLF001  (see below)
        torch.ops.aten._upsample_bilinear2d_aa.default: _bilinear,  # noqa: SLF001  (torch has no other name for it)
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


def _batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    mean: Any = None,
    variance: Any = None,
    training: bool = False,
    *rest: Any,
) -> Any:
    if training:  # torch's translation would normalize by the statistics that are only to be updated
        mean = variance = None
    return aten__native_batch_norm_legit_functional(x, weight, bias, mean, variance, training, *rest)


def _bicubic(x: Any, size: Any, align_corners: bool, height: float | None = None, width: float | None = None) -> Any:
    _refuse_corners(align_corners)
    if height is None or width is None:
        return aten__upsample_bicubic2d_aa(x, size, align_corners)
    return _scaled(x, height, width, mode="cubic", cubic_coeff_a=-0.5)


def _bilinear(x: Any, size: Any, align_corners: bool, height: float | None = None, width: float | None = None) -> Any:
    _refuse_corners(align_corners)
    if height is None or width is None:
        return aten__upsample_bilinear2d_aa(x, size, align_corners)
    return _scaled(x, height, width, mode="linear")


def _refuse_corners(align_corners: bool) -> None:
    if align_corners:  # torch places the pixels in a third way then, which is neither with corners aligned nor without
        raise ExportError(
            "an interpolation with both antialias and align_corners has no form in ONNX; leave one of the two out"
        )


def _scaled(x: Any, height: float, width: float, **how: Any) -> Any:
    """By the factors that were given: those that the rounded sizes say are others."""
    factors = op.Constant(value_floats=[1.0, 1.0, height, width])
    return op.Resize(x, None, factors, antialias=1, coordinate_transformation_mode="half_pixel", exclude_outside=1, **how)
