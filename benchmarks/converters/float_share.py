"""Share of a model that computes in float16, counted the same way for every converter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import TensorProto

# These change no number, or exist only because of the conversion.
UNCOUNTED = frozenset({"Cast", "CastLike", "Constant", "Identity"})
FLOATS: dict[int, str] = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}


@dataclass(frozen=True, kw_only=True)
class Share:
    """Nodes by the type they compute in.

    Attributes:
        float16: Nodes with a float16 input or output, and no float32 output.
        float32: Other nodes with a float32 input or output.
        casts: Cast nodes.
    """

    float16: int = 0
    float32: int = 0
    casts: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(float16=self.float16 + other.float16, float32=self.float32 + other.float32, casts=self.casts + other.casts)


def share_of(model: onnx.ModelProto) -> Share:
    """Count the nodes of the graph and of its bodies; types are inferred."""
    model = onnx.shape_inference.infer_shapes(model)
    counts = {"float16": 0, "float32": 0}
    casts = 0
    for node, types in _nodes(model.graph, {}):
        casts += node.op_type == "Cast"
        if node.op_type in UNCOUNTED:
            continue
        outputs = {types[name] for name in node.output if name in types}
        inputs = {types[name] for name in node.input if name in types}
        if "float32" in outputs or (inputs == {"float32"}):
            counts["float32"] += 1
        elif "float16" in outputs | inputs:
            counts["float16"] += 1
    return Share(**counts, casts=casts)


def _nodes(graph: onnx.GraphProto, outer: dict[str, str]) -> Iterator[tuple[onnx.NodeProto, dict[str, str]]]:
    types = dict(outer)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        if value.type.tensor_type.elem_type in FLOATS:
            types[value.name] = FLOATS[value.type.tensor_type.elem_type]
    for tensor in graph.initializer:
        if tensor.data_type in FLOATS:
            types[tensor.name] = FLOATS[tensor.data_type]
    for node in graph.node:
        yield node, types
        for attribute in node.attribute:
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(body, types)
