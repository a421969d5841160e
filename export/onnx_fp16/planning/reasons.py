"""Why a node stays in float32, before its weights are looked at."""

from __future__ import annotations

import onnx_ir

from export.onnx_fp16.element_types.signatures import first_opset_with_half
from export.onnx_fp16.graph_walk import all_nodes, bodies, is_float
from export.onnx_fp16.planning.block_lists import block_reason
from export.onnx_fp16.planning.exact_arithmetic import keep_exact
from export.onnx_fp16.planning.plan import Plan
from export.onnx_fp16.planning.quantized_gaps import quantized_gaps
from export.onnx_fp16.planning.quantized_layers import REASON as BETWEEN_REASON
from export.onnx_fp16.planning.quantized_layers import nodes_between
from export.onnx_fp16.planning.runtime_gaps import runtime_gap

KEEP = "halfserve.keep"
_TABLES = "ai.onnx.ml"


def keep_nodes(plan: Plan) -> None:
    """Keep what the user, a repair, exactness, quantization, an operator's signature or the runtime wants in float32."""
    nodes = list(all_nodes(plan.model))
    for node in nodes:
        blocked, marked = block_reason(node, plan.settings), node.metadata_props.pop(KEEP, None)
        reason = blocked or marked
        if reason is not None:
            plan.keep(node, reason)
    for node in nodes:
        if node not in plan.kept and not any(bodies(node)) and any(is_float(v) for v in (*node.inputs, *node.outputs)):
            _keep_unsupported(plan, node)
    keep_exact(plan)
    for node in nodes_between(plan.model):
        plan.keep(node, BETWEEN_REASON)
    for node, reason in quantized_gaps(plan.model):
        plan.keep(node, reason)


def _keep_unsupported(plan: Plan, node: onnx_ir.Node) -> None:
    if node.op_type == "Cast" and not node.domain:
        return
    gap = _bound_to_float32(node) or runtime_gap(node)
    if gap is not None:
        plan.keep(node, gap)
    elif not plan.places[node].some:
        plan.keep(node, _no_half(plan, node))
    else:
        return
    plan.unsupported.add(node)


def _bound_to_float32(node: onnx_ir.Node) -> str | None:
    if node.domain == _TABLES:
        return f"the tables in the attributes of {node.op_type} are float32, and its input must have their type"
    return "BitCast reads the bits of float32" if node.op_type == "BitCast" and not node.domain else None


def _no_half(plan: Plan, node: onnx_ir.Node) -> str:
    if plan.signature(node) is None:
        return f"nobody knows the types that {node.domain}:{node.op_type} takes"
    if node.domain:
        return f"{node.domain}:{node.op_type} takes no float16"
    later = first_opset_with_half(node, plan.model.opset_imports)
    if later is not None:
        return f"{node.op_type} takes float16 from opset {later} on; the model has {plan.model.opset_imports.get('', 1)}"
    return f"{node.op_type} takes no float16"
