"""Outputs whose shapes depend on values, so that one rounding may change how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

_SOURCES = frozenset({"Compress", "Loop", "NonMaxSuppression", "NonZero", "StringSplit", "Unique"})


def data_dependent_values(graph: onnx.GraphProto) -> set[str]:
    """Names of the values that come, over any number of nodes, from one whose result's shape depends on the data."""
    dependent: set[str] = set()
    for node in graph.node:
        if node.op_type in _SOURCES or not dependent.isdisjoint(node.input) or any(map(_has_source, _bodies(node))):
            dependent.update(name for name in node.output if name)
    return dependent


def _has_source(graph: onnx.GraphProto) -> bool:
    return any(node.op_type in _SOURCES or any(map(_has_source, _bodies(node))) for node in graph.node)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
