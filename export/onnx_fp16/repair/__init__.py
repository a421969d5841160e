"""Rewrites of a float32 graph, equal in exact arithmetic, that float16 can hold."""

from __future__ import annotations

from export.onnx_fp16.passes import RepairPass
from export.onnx_fp16.repair.fold_batch_norm import FoldBatchNorm
from export.onnx_fp16.repair.fold_scale import FoldScale
from export.onnx_fp16.repair.keep_fragile import KeepFragile
from export.onnx_fp16.repair.keep_masks import KeepMasks
from export.onnx_fp16.repair.limit_gelu import LimitGelu
from export.onnx_fp16.repair.refuse_layer_norm import RefuseLayerNorm
from export.onnx_fp16.repair.refuse_log_softmax import RefuseLogSoftmax
from export.onnx_fp16.repair.refuse_moments import RefuseMoments
from export.onnx_fp16.repair.refuse_softmax import RefuseSoftmax
from export.onnx_fp16.repair.refuse_softplus import RefuseSoftplus
from export.onnx_fp16.repair.soften_masks import SoftenMasks

# In this order: weights first, then operators in one piece, and last what can only be kept.
REPAIRS: tuple[RepairPass, ...] = (
    FoldBatchNorm(),
    FoldScale(),
    RefuseLayerNorm(),
    RefuseMoments(),
    RefuseSoftmax(),
    RefuseLogSoftmax(),
    RefuseSoftplus(),
    LimitGelu(),
    SoftenMasks(),
    KeepMasks(),
    KeepFragile(),
)
