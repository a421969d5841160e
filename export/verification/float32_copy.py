"""A half-precision model held in float32, so that ONNX Runtime's CPU provider runs it: it has hardly any bfloat16 kernels.

Every half value becomes float32. Weights stay as they are stored, each behind a cast, so that they can be mapped from their
files. With `rounded`, each cast to the half type becomes two, there and back, and the values stay numbers of that type: so a
model whose every node rounds (see `halfserve.export.verification.simulation`) still does. Without, nothing but the weights is
rounded, as where a server computes such a model in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from halfserve.export.half_types import HalfType
from halfserve.export.onnx_files.proto_graphs import all_graphs
from halfserve.export.onnx_fp16.graph import TYPE_ATTRIBUTES

STORED, GIVEN, NARROW = "/stored", "/given", "/narrow"


def hold_in_float32(model: onnx.ModelProto, half: HalfType, *, rounded: bool) -> None:
    """Change a model without functions in place.

    Args:
        model: The model.
        half: The type of the values to hold in float32.
        rounded: Whether casts to the half type go on to round.
    """
    given = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == half.elem_type}
    given -= {tensor.name for tensor in model.graph.initializer}
    for graph in all_graphs(model):
        _rename(graph, given)
    for graph in reversed(list(all_graphs(model))):  # bodies before the nodes that hold them are copied
        _hold(graph, half, rounded=rounded)
    nodes = [node for name in sorted(given) for node in _both_ways(name, f"{name}{GIVEN}", half)]
    _prepend(model.graph, nodes)


def _hold(graph: onnx.GraphProto, half: HalfType, *, rounded: bool) -> None:
    stored = {tensor.name for tensor in graph.initializer if tensor.data_type == half.elem_type}
    kept = [value for value in graph.input if value.name not in stored]  # formats before IR 4 list weights as inputs
    del graph.input[:]
    graph.input.extend(kept)
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        _widen_type(value.type, half)
    for tensor in graph.initializer:
        if tensor.name in stored:
            tensor.name += STORED
    nodes = [helper.make_node("Cast", [f"{name}{STORED}"], [name], to=TensorProto.FLOAT) for name in sorted(stored)]
    for node in graph.node:
        casts = node.op_type == "Cast" and not node.domain and _number(node, "to") == half.elem_type
        if casts and rounded:
            nodes += _both_ways(node.input[0], node.output[0], half)
            continue
        for attribute in node.attribute:
            _widen_attribute(attribute, half)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _both_ways(source: str, result: str, half: HalfType) -> Iterator[onnx.NodeProto]:
    """A cast to the half type and one back to float32."""
    yield helper.make_node("Cast", [source], [f"{result}{NARROW}"], to=half.elem_type)
    yield helper.make_node("Cast", [f"{result}{NARROW}"], [result], to=TensorProto.FLOAT)


def _prepend(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    behind = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *behind])


def _rename(graph: onnx.GraphProto, given: set[str]) -> None:
    """Let nodes read the rounded inputs of the model; an output that is an input stays as it is."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in given:
                node.input[index] = f"{name}{GIVEN}"


def _number(node: onnx.NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)


def _widen_attribute(attribute: AttributeProto, half: HalfType) -> None:
    if attribute.name in TYPE_ATTRIBUTES and attribute.i == half.elem_type:
        attribute.i = TensorProto.FLOAT
    if attribute.HasField("tp"):
        _widen_type(attribute.tp, half)
    if attribute.HasField("t") and attribute.t.data_type == half.elem_type:
        array = numpy_helper.to_array(attribute.t).astype(np.float32)
        attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))


def _widen_type(kind: onnx.TypeProto, half: HalfType) -> None:
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(kind, which)
        if tensor.elem_type == half.elem_type:
            tensor.elem_type = TensorProto.FLOAT
    elif which in ("sequence_type", "optional_type"):
        _widen_type(getattr(kind, which).elem_type, half)
