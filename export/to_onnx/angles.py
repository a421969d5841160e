"""Angles in every quarter, and signs: torch's own translations turn the wrong way where a side is 0, and see no sign of -0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_signbit
from onnxscript.onnx_opset import opset18
from torch import Tensor
from torch.overrides import TorchFunctionMode

op: Any = opset18  # its annotations are of what it runs at once, not of what it records


class AnglesByParts(TorchFunctionMode):
    """Inside, the angle of a complex number is recorded as the one between its two parts: only real ones can be translated."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Put the parts in the place of the whole."""
        del types
        if func in (torch.angle, Tensor.angle):
            x = args[0] if args else dict(kwargs or {})["input"]
            if x.is_complex():
                return torch.atan2(x.imag, x.real)
        return func(*args, **(kwargs or {}))


def angle_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How angles and signs are said in ONNX, for `torch.onnx.export`."""
    aten = torch.ops.aten
    return {aten.angle.default: _angle, aten.atan2.default: _atan2, aten.signbit.default: _signbit}


def _angle(x: Any) -> Any:
    """Of real numbers: half a turn below 0. torch's translation has pi in the type of x, which is 3 in whole numbers."""
    if not x.dtype.is_floating_point():
        x = op.Cast(x, to=onnx_ir.DataType.FLOAT)
        x.dtype = onnx_ir.DataType.FLOAT
    zero = _number(0.0, x)
    return op.Where(op.IsNaN(x), x, op.Where(op.Less(x, zero), _number(math.pi, x), zero))


def _atan2(y: Any, x: Any) -> Any:
    """By the sizes of both, in the quarter that their signs say, also those of -0, which small numbers are in float16."""
    tall, wide, half_turn = op.Abs(y), op.Abs(x), _number(math.pi, y)
    alike = op.Equal(tall, wide)  # an infinity by an infinity, and 0 by 0, are no numbers
    steep = op.Atan(op.Where(alike, op.Sign(tall), op.Div(tall, wide)))
    turned = op.Where(_is_negative(x), op.Sub(half_turn, steep), steep)
    return op.Where(_is_negative(y), op.Neg(turned), turned)


def _signbit(x: Any) -> Any:
    return _is_negative(x) if x.dtype.is_floating_point() else aten_signbit(x)


def _is_negative(x: Any) -> Any:
    zero = _number(0.0, x)
    return op.Or(op.Less(x, zero), op.Less(op.Div(_number(1.0, x), x), zero))


def _number(value: float, like: Any) -> Any:
    return op.Constant(value=onnx_ir.tensor(value, dtype=like.dtype))
