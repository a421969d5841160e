"""Nodes that only move numbers between float32 nodes stay float32 too: casts in between would cost time and digits."""

from __future__ import annotations

import onnx_ir

from export.onnx_fp16.graph_walk import FLOAT, all_nodes, is_float
from export.onnx_fp16.planning.op_sets import MOVERS
from export.onnx_fp16.planning.plan import Plan
from export.onnx_fp16.planning.weight_range import weight_of

REASON = "moves numbers between float32 nodes"


def close_islands(plan: Plan) -> None:
    """Keep the movers whose every source and every reader is float32, if at least one of these is a kept node."""
    movers = {node for node in all_nodes(plan.model) if _is_mover(node) and node not in plan.kept}
    inner = {node for node in movers if not _reads_table(plan, node)}
    pending = list(inner)
    while pending:
        node = pending.pop()
        if node in inner and not (_sources_are_single(plan, node, inner) and _readers_are_single(plan, node, inner)):
            inner.discard(node)
            pending += [near for near in _neighbours(node) if near in inner]
    reached = [node for node in inner if any(near in plan.kept for near in _neighbours(node) if _computes(near))]
    seen: set[onnx_ir.Node] = set()
    while reached:
        node = reached.pop()
        if node not in seen:
            seen.add(node)
            reached += [near for near in _neighbours(node) if near in inner]
    for node in all_nodes(plan.model):
        if node in seen:
            plan.keep(node, REASON)


def _is_mover(node: onnx_ir.Node) -> bool:
    return node.op_type in MOVERS and not node.domain and any(is_float(value) for value in node.inputs)


def _reads_table(plan: Plan, node: onnx_ir.Node) -> bool:
    """Whether a node picks rows out of a weight: a float32 vocabulary takes twice its room, or thrice if tied.

    The rows that are picked are fewer, and a cast of them is cheap.
    """
    table = node.inputs[0]
    return node.op_type == "Gather" and table is not None and weight_of(plan, table) is not None


def _computes(node: onnx_ir.Node) -> bool:
    return node.op_type not in ("Cast", "Constant")


def _sources_are_single(plan: Plan, node: onnx_ir.Node, inner: set[onnx_ir.Node]) -> bool:
    for value in node.inputs:
        if value is None or not is_float(value) or weight_of(plan, value) is not None:
            continue
        maker = value.producer()
        if maker is None or (maker not in inner and not _gives_single(plan, maker, value)):
            if maker is None and not plan.gives_half(value):
                continue
            return False
    return True


def _gives_single(plan: Plan, maker: onnx_ir.Node, value: onnx_ir.Value) -> bool:
    if maker.op_type == "Cast" and not maker.domain:
        return True
    return not plan.gives_half(value)


def _readers_are_single(plan: Plan, node: onnx_ir.Node, inner: set[onnx_ir.Node]) -> bool:
    for value in node.outputs:
        if any(user not in inner and plan.wanted(user, index) is not FLOAT for user, index in value.uses()):
            return False
        if value.is_graph_output() and not _output_is_single(plan, value):
            return False
    return True


def _output_is_single(plan: Plan, value: onnx_ir.Value) -> bool:
    graph = value.graph
    if not isinstance(graph, onnx_ir.Graph):
        return False
    places = (index for index, output in enumerate(graph.outputs) if output is value)
    return all(plan.wanted_as_output(graph, index) == FLOAT for index in places)


def _neighbours(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    makers = [value.producer() for value in node.inputs if value is not None and is_float(value)]
    readers = [user for value in node.outputs for user in value.consumers()]
    return [near for near in (*makers, *readers) if near is not None]
