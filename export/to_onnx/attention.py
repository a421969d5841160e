"""Attention whose mask hides a whole row: torch answers 0 there, and torch's own translation the mean of all values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
from onnxscript.onnx_opset import opset18

op: Any = opset18  # its annotations are of what it runs at once, not of what it records
ATTENTION_OPSET = 23  # from which torch says it by ONNX's own Attention


def attention_translations(opset_version: int | None) -> dict[Callable[..., Any], Callable[..., Any]]:
    """How attention is said in ONNX, for `torch.onnx.export`; None stands for torch's choice of the version."""
    if opset_version is not None and opset_version >= ATTENTION_OPSET:
        return {}
    return {torch.ops.aten.scaled_dot_product_attention.default: _attention}


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    result = aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is None or attn_mask.dtype != onnx_ir.DataType.BOOL:
        return result
    # Read off the mask, not the scores: it is smaller, and often the same one in every layer.
    last = op.Constant(value_ints=[-1])
    seen = op.ReduceMax(op.Cast(attn_mask, to=onnx_ir.DataType.INT32), last, keepdims=1)
    nothing = op.Constant(value=onnx_ir.tensor(0.0, dtype=query.dtype))
    return op.Where(op.Cast(seen, to=onnx_ir.DataType.BOOL), result, nothing)
