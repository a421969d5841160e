"""Every node and graph in an ONNX message, bodies and functions included; tensors are in protos.onnx_tensors."""

from __future__ import annotations

from collections.abc import Iterator

import onnx


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the graph, of the functions, and of the bodies of both."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            yield from _with_bodies(node)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graph, and every body."""
    yield model.graph
    for node in all_nodes(model):
        for attribute in node.attribute:
            yield from _bodies(attribute)


def _with_bodies(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    yield node
    for attribute in node.attribute:
        for body in _bodies(attribute):
            for inner in body.node:
                yield from _with_bodies(inner)


def _bodies(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs
