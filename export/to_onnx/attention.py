"""Attention as torch's own translation does not say it: of a mask that hides a whole row, and of tensors without heads.

Where a row sees nothing torch answers 0, and its translation the mean of all values, or NaN where the mask is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
from onnxscript.onnx_opset import opset18

op: Any = opset18  # its annotations are of what it runs at once, not of what it records
AXES = 4  # batch, heads, length, width
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
    missing = AXES - len(query.shape)
    if missing > 0:  # the mask's axes are counted from the last one, so it stays
        query, key, value = (_with_axes(tensor, missing) for tensor in (query, key, value))
    result = aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    result = _zero_where_nothing_is_seen(result, query, attn_mask)
    return op.Squeeze(result, op.Constant(value_ints=list(range(missing)))) if missing > 0 else result


def _with_axes(tensor: Any, missing: int) -> Any:
    larger = op.Unsqueeze(tensor, op.Constant(value_ints=list(range(missing))))
    larger.dtype, larger.shape = tensor.dtype, onnx_ir.Shape([*[1] * missing, *tensor.shape])
    return larger


def _zero_where_nothing_is_seen(result: Any, query: Any, attn_mask: Any) -> Any:
    if attn_mask is None:
        return result
    # Read off the mask, not the scores: it is smaller, and often the same one in every layer.
    last = op.Constant(value_ints=[-1])
    nothing = op.Constant(value=onnx_ir.tensor(0.0, dtype=query.dtype))
    if attn_mask.dtype == onnx_ir.DataType.BOOL:
        seen = op.ReduceMax(op.Cast(attn_mask, to=onnx_ir.DataType.INT32), last, keepdims=1)
        return op.Where(op.Cast(seen, to=onnx_ir.DataType.BOOL), result, nothing)
    # A mask that is added hides by -infinity, as nn.MultiheadAttention makes one of a mask of bools.
    infinite = op.Constant(value=onnx_ir.tensor(-math.inf, dtype=attn_mask.dtype))
    return op.Where(op.Equal(op.ReduceMax(attn_mask, last, keepdims=1), infinite), nothing, result)
