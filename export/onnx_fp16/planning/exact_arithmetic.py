"""Floats that are integers in disguise: shapes, indices, positions, sums of quantized products. They stay exact."""

from __future__ import annotations

from export.onnx_fp16.planning.index_chains import IndexChains
from export.onnx_fp16.planning.integer_products import ADDEND_REASON, SCALING_REASON, addend_nodes, scaling_nodes
from export.onnx_fp16.planning.plan import Plan
from export.onnx_fp16.planning.shape_chains import REASON, shape_chains


def keep_exact(plan: Plan) -> None:
    """Keep the nodes that must compute exactly."""
    nodes, passed = shape_chains(plan.model)
    for value in passed:
        plan.keep_group(value)
    for node in nodes:
        plan.keep(node, REASON)
    for node, reason in IndexChains(plan.model).find().items():
        plan.keep(node, reason)
    for node in scaling_nodes(plan.model):
        plan.keep(node, SCALING_REASON)
    for node in addend_nodes(plan.model):
        plan.keep(node, ADDEND_REASON)
