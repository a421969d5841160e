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
from onnxscript.onnx_opset import opset18, opset23

op: Any = opset18  # its annotations are of what it runs at once, not of what it records
op23: Any = opset23
AXES = 4  # batch, heads, length, width
ATTENTION_OPSET = 23  # from which ONNX has an Attention of its own


def attention_translations(opset_version: int | None) -> dict[Callable[..., Any], Callable[..., Any]]:
    """How attention is said in ONNX, for `torch.onnx.export`; None stands for torch's choice of the version."""
    one_node = opset_version is not None and opset_version >= ATTENTION_OPSET
    said = _in_one_node if one_node else _in_many_nodes

    def attention(
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
        result = said(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return op.Squeeze(result, op.Constant(value_ints=list(range(missing)))) if missing > 0 else result

    return {torch.ops.aten.scaled_dot_product_attention.default: attention}


def _in_one_node(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    if dropout_p or not _one_node_says_it(query, key, value, grouped=grouped):
        return _in_many_nodes(query, key, value, attn_mask, dropout_p, is_causal, scale, grouped)
    mask = _of_every_pair(attn_mask, query, key)
    result, _, _, _ = op23.Attention(query, key, value, attn_mask=mask, scale=scale, is_causal=is_causal)
    return result


def _one_node_says_it(query: Any, key: Any, value: Any, *, grouped: bool) -> bool:
    """Whether ONNX's Attention takes the tensors: unlike torch it repeats none along the batch, and no head unasked."""
    sizes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(size) != AXES for size in sizes) or len({size[0] for size in sizes}) > 1:
        return False
    return len({size[1] for size in (sizes[1:] if grouped else sizes)}) == 1


def _of_every_pair(mask: Any, query: Any, key: Any) -> Any:
    """The mask with a row for each query and a place for each key, which ONNX Runtime does not repeat."""
    if mask is None or tuple(mask.shape[-2:]) == (query.shape[2], key.shape[2]):
        return mask
    pairs = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
    return op.Expand(mask, pairs)


def _in_many_nodes(query: Any, key: Any, value: Any, attn_mask: Any, *options: Any) -> Any:
    result = aten_scaled_dot_product_attention(query, key, value, attn_mask, *options)
    return _zero_where_nothing_is_seen(result, query, attn_mask)


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
