"""Nodes that stay float32 because bfloat16 has 8 significant bits: norms, softmax, long sums and coordinates.

Rounding to bfloat16 moves a number by up to 2**-8 of itself, to float16 by 2**-11. Products lose little by that, as hardware
sums them in float32. But a count of 257, the exponential of a rounded logit of 30, or the position 1001 of 1024 pixels is
visibly wrong. PyTorch's autocast keeps the same operations in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir

from halfserve.export.onnx_fp16.graph import ELEMENTWISE, MOVERS, all_nodes, is_float, operators
from halfserve.export.onnx_fp16.planning.plan import CastingPlan

NORM_REASON = "a norm: bfloat16 has too few digits for means and variances"
SOFTMAX_REASON = "a softmax: an exponential multiplies the error of a bfloat16 logit"
SUM_REASON = "a long sum: bfloat16 has too few digits for it"
GRID_REASON = "computes where to sample: bfloat16 holds whole numbers up to 256 only"

NORMS = operators(
    """
    BatchNormalization GroupNorm GroupNormalization InstanceNormalization LRN LayerNormalization LpNormalization
    MeanVarianceNormalization RMSNormalization SimplifiedLayerNormalization SkipGroupNorm SkipLayerNormalization
    SkipSimplifiedLayerNormalization
    """
)
SOFTMAXES = operators("LogSoftmax Softmax")
SUMS = operators(
    """
    CumSum GlobalAveragePool GlobalLpPool ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSum
    ReduceSumSquare
    """
)
_REASONS = {
    **dict.fromkeys(NORMS, NORM_REASON),
    **dict.fromkeys(SOFTMAXES, SOFTMAX_REASON),
    **dict.fromkeys(SUMS, SUM_REASON),
}
# Indices of the inputs that hold coordinates, by operator.
_COORDINATES = {"AffineGrid": 0, "DeformConv": 2, "GridSample": 1, "MaxRoiPool": 1, "NonMaxSuppression": 0, "RoiAlign": 1}
_DOMAINS = ("", "com.microsoft")


def keep_precise(plan: CastingPlan) -> None:
    """Keep the nodes of a bfloat16 model whose results need more digits."""
    for node in all_nodes(plan.model):
        if node.domain not in _DOMAINS:
            continue
        reason = _REASONS.get(node.op_type)
        if reason is not None and any(is_float(value) for value in (*node.inputs, *node.outputs)):
            plan.keep(node, reason)
        for maker in _coordinate_makers(node):
            plan.keep(maker, GRID_REASON)


def _coordinate_makers(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """A node that samples at coordinates, and the nodes that compute these elementwise; none for any other node."""
    place = _COORDINATES.get(node.op_type)
    if place is None or node.domain or place >= len(node.inputs):
        return
    yield node
    waiting, seen = [node.inputs[place]], {node}
    while waiting:
        value = waiting.pop()
        maker = value.producer() if value is not None and is_float(value) else None
        if maker is None or maker in seen or maker.domain or maker.op_type not in ELEMENTWISE | MOVERS | {"AffineGrid"}:
            continue
        seen.add(maker)
        yield maker
        waiting += maker.inputs
