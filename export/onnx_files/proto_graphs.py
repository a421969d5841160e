"""Graphs, nodes and value types of an ONNX message, bodies and functions included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from halfserve.export.half_types import BF16, FP16, HALF_TYPES, HalfType

_CONVERTED = "halfserve.converted"  # see `onnx_fp16.settings.mark`


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in a node's attributes: branches of an If, the body of a Loop."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of the graph, of the functions, and of the bodies of both."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            yield from _with_bodies(node)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph, and every body."""
    yield model.graph
    for node in all_nodes(model):
        yield from bodies(node)


def half_type_of(model: onnx.ModelProto) -> HalfType:
    """Return the half-precision type of a converted model, as its mark, else its types say; float16 where it holds none."""
    stated = next((entry.value for entry in model.metadata_props if entry.key == _CONVERTED), "")
    for half in HALF_TYPES.values():
        if stated == half.name:
            return half
    found = {tensor.data_type for graph in all_graphs(model) for tensor in graph.initializer}
    found |= {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    found |= {attribute.i for node in all_nodes(model) for attribute in node.attribute if attribute.name == "to"}
    return BF16 if BF16.elem_type in found and FP16.elem_type not in found else FP16


def _with_bodies(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    yield node
    for body in bodies(node):
        for inner in body.node:
            yield from _with_bodies(inner)


def typed_graphs(model: onnx.ModelProto) -> Iterator[tuple[onnx.GraphProto, Mapping[str, int]]]:
    """Yield each graph, bodies included, with the element types (`TensorProto.DataType`) of all values that it can read, by
    name.
    """
    yield from _typed(_inferred(model).graph, {})


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return model  # the model's own declarations alone


def _typed(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[onnx.GraphProto, Mapping[str, int]]]:
    types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        types[tensor.name] = tensor.data_type
    yield graph, types
    for node in graph.node:
        for body in bodies(node):
            yield from _typed(body, types)
