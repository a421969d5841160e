"""Layers that torch's own translations say wrong: a Conv3d without a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_conv3d
from onnxscript.onnx_opset import opset18

op: Any = opset18  # its annotations are of what it runs at once, not of what it records


def layer_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """How these layers are said in ONNX, for `torch.onnx.export`."""
    return {torch.ops.aten.conv3d.default: _conv3d}


def _conv3d(x: Any, weight: Any, bias: Any = None, *rest: Any, **named: Any) -> Any:
    if bias is None:  # torch's translation makes one of two axes, which no runtime takes
        channels = op.Shape(weight, start=0, end=1)
        bias = op.Expand(op.Constant(value=onnx_ir.tensor(0.0, dtype=weight.dtype)), channels)
    return aten_conv3d(x, weight, bias, *rest, **named)
