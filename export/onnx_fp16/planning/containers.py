"""Sequences and optionals: no Cast converts them, so all that flow into each other have one type."""

from __future__ import annotations

import onnx_ir

from export.onnx_fp16.element_types.control_flow import OPERATORS
from export.onnx_fp16.graph_walk import all_nodes, is_container, is_float
from export.onnx_fp16.planning.plan import Plan


def settle_containers(plan: Plan) -> None:
    """Keep the nodes whose sequences and optionals must stay float32: for the interface, or for another node's sake."""
    graph = plan.model.graph
    for value in (*graph.inputs, *graph.outputs):
        if is_float(value) and is_container(value) and plan.settings.keeps(value.name):
            plan.keep_group(value)
    nodes = [node for node in all_nodes(plan.model) if _containers(node)]
    for node in nodes:
        if node in plan.kept or not _all_can_be_half(plan, node):
            for value in _containers(node):
                plan.keep_group(value)
    for node in nodes:
        groups = {plan.ties.group_of(value) for value in _containers(node)}
        if groups & plan.single_groups and not (node.op_type in OPERATORS and not node.domain):
            plan.keep(node, "its sequence or optional stays float32 for another's sake: those cannot be cast")


def _containers(node: onnx_ir.Node) -> list[onnx_ir.Value]:
    values = (*node.inputs, *node.outputs)
    return [value for value in values if value is not None and is_float(value) and is_container(value)]


def _all_can_be_half(plan: Plan, node: onnx_ir.Node) -> bool:
    if node.op_type in OPERATORS and not node.domain:
        return True
    places = plan.places[node]
    pairs = (*zip(node.inputs, places.inputs, strict=True), *zip(node.outputs, places.outputs, strict=True))
    return all(can for value, can in pairs if is_float(value))
