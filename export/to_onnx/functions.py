"""Functions that torch's own translations say wrong.

What overflows or vanishes inside, a mean that does not divide, and a loss not smoothed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_scatter_reduce
from onnxscript.function_libs.torch_lib.ops.nn import aten_cross_entropy_loss
from onnxscript.onnx_opset import opset18

from export.errors import ExportError

op: Any = opset18  # its annotations are of what it runs at once, not of what it records

MOST_STEPS = 20  # of a sum along an axis whose length varies: 2 to this power places at most

# Of Numerical Recipes, 6.2: erfc(x) is part * exp(-x * x + their polynomial in part), where part is 1 / (1 + x / 2).
ERFCX = (
    0.17087277,
    -0.82215223,
    1.48851587,
    -1.13520398,
    0.27886807,
    -0.18628806,
    0.09678418,
    0.37409196,
    1.00002368,
    -1.26551223,
)


def function_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How these functions are said in ONNX, for `torch.onnx.export`."""
    return {
        torch.ops.aten.cross_entropy_loss.default: _cross_entropy,
        torch.ops.aten.special_erfcx.default: _erfcx,
        torch.ops.aten.log_sigmoid.default: _log_sigmoid,
        torch.ops.aten.logaddexp.default: _logaddexp,
        torch.ops.aten.logaddexp2.default: _logaddexp2,
        torch.ops.aten.logcumsumexp.default: _logcumsumexp,
        torch.ops.aten.scatter_reduce.two: _scatter_reduce,
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
    """By an approximation, 1.2e-7 off at most: torch multiplies exp(x * x), which overflows, by erfc(x), which has vanished."""
    size, one = op.Abs(x), _number(1.0, x)
    part = op.Div(one, op.Add(op.Mul(size, _number(0.5, x)), one))
    power = _number(ERFCX[0], x)
    for factor in ERFCX[1:]:
        power = op.Add(op.Mul(power, part), _number(factor, x))
    positive = op.Mul(part, op.Exp(power))
    negative = op.Sub(op.Mul(op.Exp(op.Mul(x, x)), _number(2.0, x)), positive)
    return op.Where(op.Less(x, _number(0.0, x)), negative, positive)


def _log_sigmoid(x: Any) -> Any:
    """Without the sigmoid itself, whose logarithm is wrong from -15 on and infinite from -18, as runtimes compute it."""
    if x.dtype == onnx_ir.DataType.DOUBLE:  # ONNX Runtime has no Softplus of it
        added = op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), _number(1.0, x)))
        return op.Sub(op.Min(x, _number(0.0, x)), added)
    return op.Neg(op.Softplus(op.Neg(x)))


def _logaddexp(one: Any, other: Any) -> Any:
    """The larger, and what the smaller adds to it: the sum itself leaves float32 at 89 and vanishes at -104."""
    added = op.Log(op.Add(op.Exp(op.Neg(_distance(one, other))), _number(1.0, one)))
    return op.Add(op.Max(one, other), added)


def _logaddexp2(one: Any, other: Any) -> Any:
    two = _number(2.0, one)
    added = op.Log(op.Add(op.Pow(two, op.Neg(_distance(one, other))), _number(1.0, one)))
    return op.Add(op.Max(one, other), op.Div(added, op.Log(two)))


def _distance(one: Any, other: Any) -> Any:
    """How far apart they are; 0 where they are the same infinity, whose difference is no number."""
    return op.Where(op.Equal(one, other), _number(0.0, one), op.Abs(op.Sub(one, other)))


def _logcumsumexp(x: Any, dim: int) -> Any:
    """In steps of 1, 2, 4, ...: each adds to a place what ends so far before it.

    torch's translation subtracts the largest of all first; what is 104 smaller vanishes then, and its logarithm with it.
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


def _number(value: float, like: Any) -> Any:
    return op.Constant(value=onnx_ir.tensor(value, dtype=like.dtype))
