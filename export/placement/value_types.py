"""Element types of the values in a graph, as far as they are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import onnx

if TYPE_CHECKING:
    from export.files.model_file import ModelFile


def typed_graphs(model: ModelFile) -> Iterator[tuple[onnx.GraphProto, Mapping[str, int]]]:
    """Each graph, bodies included, with the element types (of `TensorProto.DataType`) of the values that it sees, by name."""
    yield from _typed(_inferred(model.outline).graph, {})


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return model  # what it declares itself is all that there is


def _typed(graph: onnx.GraphProto, outer: Mapping[str, int]) -> Iterator[tuple[onnx.GraphProto, Mapping[str, int]]]:
    types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        types[tensor.name] = tensor.data_type
    yield graph, types
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _typed(body, types)
