"""Ways through a model: its graphs, nodes and values, bodies included."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir
from onnx_ir import AttributeType

FLOAT = onnx_ir.DataType.FLOAT
FLOAT16 = onnx_ir.DataType.FLOAT16
_CONTAINERS = (onnx_ir.SequenceType, onnx_ir.OptionalType)  # isinstance is slow here: they are runtime-checked protocols
_GRAPH_TYPES = (AttributeType.GRAPH, AttributeType.GRAPHS)


def bodies(node: onnx_ir.Node) -> Iterator[onnx_ir.Graph]:
    """The graphs that a node holds: branches of an If, the body of a Loop."""
    for attribute in node.attributes.values():
        if attribute.type not in _GRAPH_TYPES or attribute.is_ref():
            continue
        if attribute.type == AttributeType.GRAPH:
            yield attribute.as_graph()
        else:
            yield from attribute.as_graphs()


def all_graphs(model: onnx_ir.Model) -> Iterator[onnx_ir.Graph]:
    """The main graph and every body, each before those inside it."""
    yield from _graphs(model.graph)


def all_nodes(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    """Every node of the main graph and of the bodies, in order; a node comes before its bodies' nodes."""
    yield from nodes_within(model.graph)


def nodes_within(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Node]:
    """Every node of a graph and of the bodies in it."""
    for node in graph:
        yield node
        if node.attributes:
            for body in bodies(node):
                yield from nodes_within(body)


def is_float(value: onnx_ir.Value | None) -> bool:
    """Whether a value is float32: a tensor, or a sequence or optional of such."""
    return value is not None and value.type is not None and value.dtype == FLOAT


def is_container(value: onnx_ir.Value) -> bool:
    """Whether a value is a sequence or an optional, which no Cast can convert."""
    return type(value.type) in _CONTAINERS


def constant_of(value: onnx_ir.Value | None) -> onnx_ir.TensorProtocol | None:
    """The tensor behind an initializer that nobody can override, or behind a Constant node; None for any other value."""
    if value is None:
        return None
    producer = value.producer()
    if producer is None:
        return value.const_value if value.is_initializer() and not value.is_graph_input() else None
    if producer.op_type == "Constant" and producer.domain == "":
        attribute = producer.attributes.get("value")
        return attribute.as_tensor() if attribute is not None and attribute.type == AttributeType.TENSOR else None
    return None


def asks_for_infinity(node: onnx_ir.Node) -> bool:
    """Whether a node does nothing but compare with -infinity, which no other number equals, however large it is.

    As attention does over the largest number of a row of its mask, to answer 0 where the row hides everything.
    """
    if node.domain:
        return False
    if node.op_type == "ReduceMax":
        largest = node.outputs[0]
        return not largest.is_graph_output() and all(asks_for_infinity(use.node) for use in largest.uses())
    sides = [tensor for side in node.inputs if (tensor := constant_of(side)) is not None] if node.op_type == "Equal" else []
    return any(tensor.dtype == FLOAT and bool(np.isneginf(tensor.numpy()).all()) for tensor in sides)


def _graphs(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Graph]:
    yield graph
    for node in graph:
        for body in bodies(node):
            yield from _graphs(body)
