"""Translations of elementwise functions and reductions that replace torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import (
    aten_bitwise_left_shift,
    aten_bitwise_right_shift,
    aten_scatter_reduce,
    aten_signbit,
)
from onnxscript.function_libs.torch_lib.ops.nn import aten_cross_entropy_loss
from onnxscript.onnx_opset import opset18
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfserve.export.export_errors import ExportError

op: Any = opset18  # its annotations describe eager execution, not the recording of a graph

MOST_STEPS = 20  # doubling steps of a running sum along a dynamic axis, so its length is at most 2 to this power

# Numerical Recipes, 6.2: erfc(x) = t * exp(-x * x + polynomial(t)), t = 1 / (1 + x / 2).
ERFCX = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223,
)  # fmt: skip

UNSIGNED = frozenset({onnx_ir.DataType.UINT8, onnx_ir.DataType.UINT16, onnx_ir.DataType.UINT32, onnx_ir.DataType.UINT64})


def operator_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """ONNX translations of these operators, for `torch.onnx.export`."""
    aten = torch.ops.aten
    left, right = (
        (plain.Tensor, plain.Tensor_Scalar, signed.Scalar, signed.Tensor)
        for plain, signed in ((aten.bitwise_left_shift, aten.__lshift__), (aten.bitwise_right_shift, aten.__rshift__))
    )
    return {
        aten.angle.default: _angle,
        aten.atan2.default: _atan2,
        aten.cross_entropy_loss.default: _cross_entropy,
        aten.log_sigmoid.default: _log_sigmoid,
        aten.logaddexp.default: _logaddexp,
        aten.logaddexp2.default: _logaddexp2,
        aten.logcumsumexp.default: _logcumsumexp,
        aten.scatter_reduce.two: _scatter_reduce,
        aten.signbit.default: _signbit,
        aten.special_erfcx.default: _erfcx,
        **dict.fromkeys(left, _left_shift),
        **dict.fromkeys(right, _right_shift),
    }


def _cross_entropy(
    x: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if label_smoothing:
        raise ExportError("a cross entropy with label_smoothing has no form in ONNX; leave it out or use log_softmax")
    return aten_cross_entropy_loss(x, target, weight, reduction, ignore_index)


def _erfcx(x: Any) -> Any:
    """Return an approximation, off by 1.2e-7 at most: torch multiplies exp(x * x), which overflows, by erfc(x),
    which vanishes.
    """
    size, one = op.Abs(x), _number(1.0, x)
    part = op.Div(one, op.Add(op.Mul(size, _number(0.5, x)), one))
    power = _number(ERFCX[0], x)
    for factor in ERFCX[1:]:
        power = op.Add(op.Mul(power, part), _number(factor, x))
    positive = op.Mul(part, op.Exp(power))
    negative = op.Sub(op.Mul(op.Exp(op.Mul(x, x)), _number(2.0, x)), positive)
    return op.Where(op.Less(x, _number(0.0, x)), negative, positive)


def _log_sigmoid(x: Any) -> Any:
    """-softplus(-x): the logarithm of the sigmoid is wrong from -15 on and infinite from -18 in runtimes."""
    if x.dtype == onnx_ir.DataType.DOUBLE:  # ONNX Runtime has no Softplus for it
        added = op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), _number(1.0, x)))
        return op.Sub(op.Min(x, _number(0.0, x)), added)
    return op.Neg(op.Softplus(op.Neg(x)))


def _logaddexp(one: Any, other: Any) -> Any:
    """Max + log(1 + exp(-distance)): a sum of exponentials leaves float32 at 89 and vanishes at -104."""
    added = op.Log(op.Add(op.Exp(op.Neg(_distance(one, other))), _number(1.0, one)))
    return op.Add(op.Max(one, other), added)


def _logaddexp2(one: Any, other: Any) -> Any:
    two = _number(2.0, one)
    added = op.Log(op.Add(op.Pow(two, op.Neg(_distance(one, other))), _number(1.0, one)))
    return op.Add(op.Max(one, other), op.Div(added, op.Log(two)))


def _distance(one: Any, other: Any) -> Any:
    """|one - other|; 0 where both are the same infinity, whose difference is NaN."""
    return op.Where(op.Equal(one, other), _number(0.0, one), op.Abs(op.Sub(one, other)))


def _logcumsumexp(x: Any, dim: int) -> Any:
    """Return a scan in steps of 1, 2, 4, ...: each adds the sum that ends that many places before.

    torch's translation subtracts the largest element first; a prefix that is 104 smaller vanishes, and its logarithm is -inf.
    """
    if not x.shape:
        return x
    axis = dim % len(x.shape)
    size, total, along = x.shape[axis], op.Shape(x, start=axis, end=axis + 1), op.Constant(value_ints=[axis])
    none, nothing = op.Constant(value_ints=[0]), _number(-math.inf, x)
    result = x
    for step in range((size - 1).bit_length() if isinstance(size, int) else MOST_STEPS):
        shift = op.Min(op.Constant(value_ints=[1 << step]), total)
        earlier = op.Slice(result, none, op.Sub(total, shift), along)
        moved = op.Pad(earlier, op.Concat(shift, none, axis=0), nothing, along)
        moved.dtype = result.dtype = x.dtype
        result = _logaddexp(result, moved)
    return result


def _scatter_reduce(base: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    if reduce != "mean":
        return aten_scatter_reduce(base, dim, index, source, reduce, include_self)
    if not base.dtype.is_floating_point():
        raise ExportError("scatter_reduce with 'mean' of whole numbers has no form in ONNX; give it floating numbers")
    one = _number(1.0, base)
    total = aten_scatter_reduce(base, dim, index, source, "sum", include_self)
    ones, more = op.Expand(one, op.Shape(base)), op.Expand(one, op.Shape(source))
    ones.dtype = more.dtype = base.dtype
    ones.shape, more.shape = base.shape, source.shape
    return op.Div(total, aten_scatter_reduce(ones, dim, index, more, "sum", include_self))


class TranslatableForms(TorchFunctionMode):
    """Record calls that torch.onnx does not translate in an equal form that it does.

    - The angle of a complex number is atan2 of its parts: torch.onnx translates that of real numbers alone.
    - In a float less a whole number, such as `1.0 - mask`, the latter becomes a float first.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func in (torch.angle, Tensor.angle):
            x = args[0] if args else dict(kwargs or {})["input"]
            if x.is_complex():
                return torch.atan2(x.imag, x.real)
        if func in (torch.rsub, Tensor.__rsub__) and len(args) == 2 and isinstance(args[0], Tensor):
            x, minuend = args
            args = (x.to(torch.result_type(x, minuend)), minuend)
        return func(*args, **(kwargs or {}))


def _angle(x: Any) -> Any:
    """Return the angle of a real number: pi below 0. torch's translation casts pi to the type of x, to 3 for whole numbers."""
    if not x.dtype.is_floating_point():
        x = op.Cast(x, to=onnx_ir.DataType.FLOAT)
        x.dtype = onnx_ir.DataType.FLOAT
    zero = _number(0.0, x)
    return op.Where(op.IsNaN(x), x, op.Where(op.Less(x, zero), _number(math.pi, x), zero))


def _atan2(y: Any, x: Any) -> Any:
    """atan(|y| / |x|) in the quadrant of both signs, also those of -0, to which float16 rounds small numbers."""
    tall, wide, half_turn = op.Abs(y), op.Abs(x), _number(math.pi, y)
    alike = op.Equal(tall, wide)  # inf / inf and 0 / 0 are NaN
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


def _left_shift(x: Any, places: Any) -> Any:
    return _shifted(x, places, direction="LEFT", signed=aten_bitwise_left_shift)


def _right_shift(x: Any, places: Any) -> Any:
    return _shifted(x, places, direction="RIGHT", signed=aten_bitwise_right_shift)


def _shifted(x: Any, places: Any, *, direction: str, signed: Callable[..., Any]) -> Any:
    if isinstance(places, int):
        places = op.Constant(value=onnx_ir.tensor(places, dtype=x.dtype))
    return op.BitShift(x, places, direction=direction) if x.dtype in UNSIGNED else signed(x, places)
