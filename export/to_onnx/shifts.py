"""Shifts of unsigned numbers, as packed weights and pictures are: torch's own translations give signed ones back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_bitwise_left_shift, aten_bitwise_right_shift
from onnxscript.onnx_opset import opset18

op: Any = opset18  # its annotations are of what it runs at once, not of what it records

UNSIGNED = frozenset({onnx_ir.DataType.UINT8, onnx_ir.DataType.UINT16, onnx_ir.DataType.UINT32, onnx_ir.DataType.UINT64})


def shift_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How shifts are said in ONNX, for `torch.onnx.export`."""
    aten = torch.ops.aten
    left = (
        aten.bitwise_left_shift.Tensor,
        aten.bitwise_left_shift.Tensor_Scalar,
        aten.__lshift__.Scalar,
        aten.__lshift__.Tensor,
    )
    right = (
        *(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar),
        *(aten.__rshift__.Scalar, aten.__rshift__.Tensor),
    )
    return dict.fromkeys(left, _left) | dict.fromkeys(right, _right)


def _left(x: Any, places: Any) -> Any:
    return _shifted(x, places, direction="LEFT", signed=aten_bitwise_left_shift)


def _right(x: Any, places: Any) -> Any:
    return _shifted(x, places, direction="RIGHT", signed=aten_bitwise_right_shift)


def _shifted(x: Any, places: Any, *, direction: str, signed: Callable[..., Any]) -> Any:
    if isinstance(places, int):
        places = op.Constant(value=onnx_ir.tensor(places, dtype=x.dtype))
    return op.BitShift(x, places, direction=direction) if x.dtype in UNSIGNED else signed(x, places)
