"""Translations of layers that replace torch's own: convolution, pooling, attention, recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import (
    aten__native_batch_norm_legit_functional,
    aten_conv3d,
    aten_gru,
    aten_lstm,
)
from onnxscript.function_libs.torch_lib.ops.nn import (
    aten__upsample_bicubic2d_aa,
    aten__upsample_bilinear2d_aa,
    aten_avg_pool2d,
    aten_avg_pool3d,
    aten_scaled_dot_product_attention,
)
from onnxscript.onnx_opset import opset18, opset23
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfserve.export.export_errors import ExportError

op: Any = opset18  # its annotations describe eager execution, not the recording of a graph

op23: Any = opset23
AXES = 4  # batch, heads, length, width
ATTENTION_OPSET = 23  # the first with an Attention operator
_REST = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"


def layer_translations(opset_version: int | None) -> dict[Callable[..., Any], Callable[..., Any]]:
    """ONNX translations of these layers, for `torch.onnx.export`; None stands for torch's choice of the opset."""
    return {
        torch.ops.aten.scaled_dot_product_attention.default: _attention(opset_version),
        torch.ops.halfserve.gru.default: aten_gru,
        torch.ops.halfserve.lstm.default: aten_lstm,
        torch.ops.aten.conv3d.default: _conv3d,
        torch.ops.aten.avg_pool2d.default: _avg_pool(aten_avg_pool2d, 2),
        torch.ops.aten.avg_pool3d.default: _avg_pool(aten_avg_pool3d, 3),
        torch.ops.aten._native_batch_norm_legit_functional.default: _batch_norm,  # noqa: SLF001  (see below)
        torch.ops.aten._upsample_bicubic2d_aa.default: _bicubic,  # noqa: SLF001  (see below)
        torch.ops.aten._upsample_bilinear2d_aa.default: _bilinear,  # noqa: SLF001  (torch has no other name for it)
    }


def _conv3d(x: Any, weight: Any, bias: Any = None, *rest: Any, **named: Any) -> Any:
    if bias is None:  # torch's translation makes a bias of two axes, which no runtime takes
        channels = op.Shape(weight, start=0, end=1)
        bias = op.Expand(op.Constant(value=onnx_ir.tensor(0.0, dtype=weight.dtype)), channels)
    return aten_conv3d(x, weight, bias, *rest, **named)


def _avg_pool(averaged: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Return an average over windows, which a divisor of the caller's may replace: then it is times window size / divisor."""

    def average(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,) * axes,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is None:
            return averaged(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise ExportError(
                "an average with both ceil_mode and divisor_override has no form in ONNX; leave one of the two out"
            )
        window = math.prod(kernel_size) if len(kernel_size) > 1 else kernel_size[0] ** axes
        whole = averaged(x, kernel_size, stride, padding, False, True)
        return op.Mul(whole, op.Constant(value=onnx_ir.tensor(window / divisor_override, dtype=x.dtype)))

    return average


def _batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    mean: Any = None,
    variance: Any = None,
    training: bool = False,
    *rest: Any,
) -> Any:
    if training:  # torch's translation would normalize by the running statistics
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
    if align_corners:  # torch then places the pixels in a way that ONNX does not know
        raise ExportError(
            "an interpolation with both antialias and align_corners has no form in ONNX; leave one of the two out"
        )


def _scaled(x: Any, height: float, width: float, **how: Any) -> Any:
    """Resize by the given factors, which differ from the quotients of the rounded sizes."""
    factors = op.Constant(value_floats=[1.0, 1.0, height, width])
    return op.Resize(x, None, factors, antialias=1, coordinate_transformation_mode="half_pixel", exclude_outside=1, **how)


def _attention(opset_version: int | None) -> Callable[..., Any]:
    """Attention for masks that hide a whole row, and for tensors without heads.

    Where a row is hidden, torch gives 0; torch's translation gives the mean of all values, or NaN for an additive mask.
    """
    one_node = opset_version is not None and opset_version >= ATTENTION_OPSET
    translate = _in_one_node if one_node else _in_many_nodes

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
        if missing > 0:  # the mask's axes count from the last one
            query, key, value = (_with_axes(tensor, missing) for tensor in (query, key, value))
        result = translate(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return op.Squeeze(result, op.Constant(value_ints=list(range(missing)))) if missing > 0 else result

    return attention


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
    if dropout_p or not _fits_one_node(query, key, value, grouped=grouped):
        return _in_many_nodes(query, key, value, attn_mask, dropout_p, is_causal, scale, grouped)
    mask = _broadcast_mask(attn_mask, query, key)
    result, _, _, _ = op23.Attention(query, key, value, attn_mask=mask, scale=scale, is_causal=is_causal)
    return _zero_hidden_rows(result, query, attn_mask)  # kernels differ: ONNX asks for 0, some give the mean of all values


def _fits_one_node(query: Any, key: Any, value: Any, *, grouped: bool) -> bool:
    """Return whether ONNX's Attention takes the tensors: unlike torch it does not broadcast the batch or,
    ungrouped, the heads.
    """
    sizes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(size) != AXES for size in sizes) or len({size[0] for size in sizes}) > 1:
        return False
    return len({size[1] for size in (sizes[1:] if grouped else sizes)}) == 1


def _broadcast_mask(mask: Any, query: Any, key: Any) -> Any:
    """Return the mask broadcast to every query and key, which ONNX Runtime does not do."""
    if mask is None or tuple(mask.shape[-2:]) == (query.shape[2], key.shape[2]):
        return mask
    pairs = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
    return op.Expand(mask, pairs)


def _in_many_nodes(query: Any, key: Any, value: Any, attn_mask: Any, *options: Any) -> Any:
    result = aten_scaled_dot_product_attention(query, key, value, attn_mask, *options)
    return _zero_hidden_rows(result, query, attn_mask)


def _with_axes(tensor: Any, missing: int) -> Any:
    larger = op.Unsqueeze(tensor, op.Constant(value_ints=list(range(missing))))
    larger.dtype, larger.shape = tensor.dtype, onnx_ir.Shape([*[1] * missing, *tensor.shape])
    return larger


def _zero_hidden_rows(result: Any, query: Any, attn_mask: Any) -> Any:
    if attn_mask is None:
        return result
    # Read from the mask, not the scores: it is smaller, and layers often share it.
    last = op.Constant(value_ints=[-1])
    nothing = op.Constant(value=onnx_ir.tensor(0.0, dtype=query.dtype))
    if attn_mask.dtype == onnx_ir.DataType.BOOL:
        seen = op.ReduceMax(op.Cast(attn_mask, to=onnx_ir.DataType.INT32), last, keepdims=1)
        return op.Where(op.Cast(seen, to=onnx_ir.DataType.BOOL), result, nothing)
    # An additive mask hides by -infinity; nn.MultiheadAttention makes one of a boolean mask.
    infinite = op.Constant(value=onnx_ir.tensor(-math.inf, dtype=attn_mask.dtype))
    return op.Where(op.Equal(op.ReduceMax(attn_mask, last, keepdims=1), infinite), nothing, result)


_library: Any = torch.library.Library("halfserve", "DEF")  # type: ignore[no-untyped-call]  # (torch annotates it nowhere)
_library.define(f"lstm(Tensor input, Tensor[] hx, {_REST}) -> (Tensor, Tensor, Tensor)")
_library.define(f"gru(Tensor input, Tensor hx, {_REST}) -> (Tensor, Tensor)")


class WholeRecurrentLayers(TorchFunctionMode):
    """Record torch's LSTM and GRU layers as `halfserve::lstm` and `halfserve::gru`, so that the length may vary.

    To infer the result shapes of a recurrent layer, `torch.export` runs it step by step, which fixes the number of steps. The
    two operations compute the same and have shape functions; ONNX has operators for both.

    Raises:
        ExportError: A layer takes a packed sequence or has a projection, which ONNX's operators lack.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func is torch._pack_padded_sequence:  # noqa: SLF001  (what the public function calls)
            raise ExportError("packed sequences have no form in ONNX; give the layer the padded sequence")
        if func is torch.lstm:
            hidden, cell = args[1]
            if hidden.shape[-1] != cell.shape[-1]:
                raise ExportError("an LSTM with proj_size has no form in ONNX; use LSTMCell or a Linear after the layer")
            return torch.ops.halfserve.lstm(args[0], [hidden, cell], list(args[2]), *args[3:])
        if func is torch.gru:
            return torch.ops.halfserve.gru(args[0], args[1], list(args[2]), *args[3:])
        return func(*args, **(kwargs or {}))


@torch.library.impl(_library, "lstm", "CompositeExplicitAutograd")
def _lstm(sequence: Tensor, hx: list[Tensor], params: list[Tensor], *rest: Any) -> Any:
    return torch.lstm(sequence, hx, params, *rest)


@torch.library.impl(_library, "gru", "CompositeExplicitAutograd")
def _gru(sequence: Tensor, hx: Tensor, params: list[Tensor], *rest: Any) -> Any:
    return torch.gru(sequence, hx, params, *rest)


def _lstm_shapes(sequence: Tensor, hx: list[Tensor], params: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    del params
    hidden, cell = hx
    return _steps(sequence, hidden, bidirectional=rest[4]), torch.empty_like(hidden), torch.empty_like(cell)


def _gru_shapes(sequence: Tensor, hx: Tensor, params: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    del params
    return _steps(sequence, hx, bidirectional=rest[4]), torch.empty_like(hx)


def _steps(sequence: Tensor, hidden: Tensor, *, bidirectional: bool) -> Tensor:
    """Shape (batch, length, directions * hidden), or (length, batch, ...), as the input."""
    return sequence.new_empty((*sequence.shape[:2], hidden.shape[-1] * (2 if bidirectional else 1)))


torch.library.register_fake("halfserve::lstm", _lstm_shapes, lib=_library)
torch.library.register_fake("halfserve::gru", _gru_shapes, lib=_library)
