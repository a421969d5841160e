"""Functions that torch's own translations say wrong: sums of exponentials that overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.onnx_opset import opset18

op: Any = opset18  # its annotations are of what it runs at once, not of what it records


def function_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How these functions are said in ONNX, for `torch.onnx.export`."""
    return {
        torch.ops.aten.logaddexp.default: _logaddexp,
        torch.ops.aten.logaddexp2.default: _logaddexp2,
    }


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


def _number(value: float, like: Any) -> Any:
    return op.Constant(value=onnx_ir.tensor(value, dtype=like.dtype))
