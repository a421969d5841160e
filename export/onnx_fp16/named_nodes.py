"""Nodes, operators, inputs and outputs that the settings name: whether the model has them, and which of them stay float32."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

import onnx
import onnx_ir

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_fp16.graph import all_nodes, nodes_within

_WILDCARDS = frozenset("*?[")


class ModelNames:
    """The names in a model, before and after it is prepared: a list may name what inlining or a repair removes."""

    def __init__(self, model: onnx_ir.Model) -> None:
        self.operators: set[str] = set()
        self.nodes: set[str] = set()
        self.interface = {value.name or "" for value in (*model.graph.inputs, *model.graph.outputs)}
        self.add(model)

    def add(self, model: onnx_ir.Model) -> None:
        """Add a model's names, those in its functions included."""
        functions = (node for function in model.functions.values() for node in nodes_within(function.graph))
        for node in (*all_nodes(model), *functions):
            self.operators |= {node.op_type, _qualified(node)}
            self.nodes.add(node.name or "")


def require_known(known: ModelNames, settings: ConversionSettings) -> None:
    """Check that every entry of the lists matches a name, so that a typing error is noticed.

    An operator that ONNX has and this model does not use is accepted: one list may serve several models.

    Raises:
        ExportError: An entry matches nothing; the text suggests the nearest name.
    """
    existing = {schema.name for schema in onnx.defs.get_all_schemas()} if settings.keep_fp32_ops else set()
    _require(settings.keep_fp32_ops, known.operators, known.operators | existing, "keep_fp32_ops", "operator")
    _require(settings.keep_fp32_nodes, known.nodes, known.nodes, "keep_fp32_nodes", "node")
    if not isinstance(settings.keep_io_types, bool):
        _require(settings.keep_io_types, known.interface, known.interface, "keep_io_types", "input or output")


def keep_reason(node: onnx_ir.Node, settings: ConversionSettings) -> str | None:
    """Return the reason for which the settings keep a node in float32; None where they do not."""
    for pattern in settings.keep_fp32_nodes:
        if _matches(pattern, node.name or ""):
            return "in keep_fp32_nodes" if pattern == node.name else f"matches {pattern!r} in keep_fp32_nodes"
    for pattern in settings.keep_fp32_ops:
        if _matches(pattern, node.op_type) or _matches(pattern, _qualified(node)):
            return f"{node.op_type} is in keep_fp32_ops"
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
