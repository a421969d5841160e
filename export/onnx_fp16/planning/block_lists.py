"""The user's lists of what stays in float32, by name or shell pattern."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

import onnx
import onnx_ir

from export.errors import ExportError
from export.onnx_fp16.graph_walk import all_nodes, nodes_within
from export.onnx_fp16.settings import Settings

_WILDCARDS = frozenset("*?[")


class Known:
    """The names that a model has, before and after it is prepared: a list may name what inlining or a repair took out."""

    def __init__(self, model: onnx_ir.Model) -> None:
        self.operators: set[str] = set()
        self.nodes: set[str] = set()
        self.interface = {value.name or "" for value in (*model.graph.inputs, *model.graph.outputs)}
        self.add(model)

    def add(self, model: onnx_ir.Model) -> None:
        """Take in a model's names, those in its functions included."""
        functions = (node for function in model.functions.values() for node in nodes_within(function.graph))
        for node in (*all_nodes(model), *functions):
            self.operators |= {node.op_type, _qualified(node)}
            self.nodes.add(node.name or "")


def require_known(known: Known, settings: Settings) -> None:
    """Check that every entry of the lists names something, so that a slip of the pen does not go unseen.

    An exact operator that ONNX has, but this model does not use, is fine: one list may serve several models.

    Raises:
        ExportError: An entry matches nothing; the text suggests the nearest name.
    """
    existing = {schema.name for schema in onnx.defs.get_all_schemas()} if settings.op_block_list else set()
    _require(settings.op_block_list, known.operators, known.operators | existing, "op_block_list", "operator")
    _require(settings.node_block_list, known.nodes, known.nodes, "node_block_list", "node")
    if not isinstance(settings.keep_io_types, bool):
        _require(settings.keep_io_types, known.interface, known.interface, "keep_io_types", "input or output")


def block_reason(node: onnx_ir.Node, settings: Settings) -> str | None:
    """Why a node is blocked; None where it is not."""
    for pattern in settings.node_block_list:
        if _matches(pattern, node.name or ""):
            return "in node_block_list" if pattern == node.name else f"matches {pattern!r} in node_block_list"
    for pattern in settings.op_block_list:
        if _matches(pattern, node.op_type) or _matches(pattern, _qualified(node)):
            return f"{node.op_type} is in op_block_list"
    return None


def _qualified(node: onnx_ir.Node) -> str:
    return f"{node.domain}:{node.op_type}" if node.domain else node.op_type


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


def _require(patterns: Collection[str], present: Collection[str], allowed: Collection[str], where: str, what: str) -> None:
    for pattern in patterns:
        if pattern in allowed or any(_matches(pattern, name) for name in present):
            continue
        kind = "pattern" if _WILDCARDS & set(pattern) else what
        near = difflib.get_close_matches(pattern, sorted(allowed), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "; the model has none" if not present else ""
        raise ExportError(f"{where}: the {kind} {pattern!r} matches no {what} of the model{hint}")
