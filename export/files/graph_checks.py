"""What onnx_ir, on which everything here works, needs of a model's graphs beyond operators that exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import onnx

from export.errors import ExportError
from export.files.proto_walk import all_graphs, all_nodes

_Scopes: TypeAlias = tuple[set[str], ...]  # the values of a graph, and of those around it
_TENSOR_TYPES = frozenset(onnx.TensorProto.DataType.values())


def require_sound_graphs(model: onnx.ModelProto, name: str) -> None:
    """Check that every value is made, once, and that all types are of a kind that can be converted.

    Raises:
        ExportError: Something is not so; the text says what.
    """
    for graph in all_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _require_known_type(value, name)
        for tensor in graph.initializer:
            if tensor.data_type not in _TENSOR_TYPES:
                raise _damaged(name, f"the weight {tensor.name!r} has the element type {tensor.data_type}, which ONNX lacks")
    for node in all_nodes(model):
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.UNDEFINED and not attribute.ref_attr_name:
                raise _damaged(name, f"the attribute {attribute.name!r} of {_called(node)} states no type")
    _require_made(model.graph, (), name)
    for function in model.functions:
        _require_made_by(function.node, set(function.input), set(), (), name)


def _require_known_type(value: onnx.ValueInfoProto, name: str) -> None:
    kind = value.type
    while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, which).elem_type
        if kind.WhichOneof("value") is None:
            raise _damaged(name, f"{value.name!r} is a {which.removesuffix('_type')} of no type")
    if which == "map_type":
        raise ExportError(
            f"{name}: {value.name!r} holds maps, which can be neither converted nor served; convert the model without them "
            "(zipmap=False for scikit-learn, LightGBM and XGBoost classifiers)"
        )
    if which == "tensor_type" and kind.tensor_type.elem_type not in _TENSOR_TYPES:
        raise _damaged(name, f"{value.name!r} has the element type {kind.tensor_type.elem_type}, which ONNX lacks")


def _require_made(graph: onnx.GraphProto, outer: _Scopes, name: str) -> None:
    """Check a graph; where it is a body, it may read what the graphs around it hold."""
    given = {value.name for value in graph.input}
    weights = {tensor.name for tensor in graph.initializer} | {sparse.values.name for sparse in graph.sparse_initializer}
    scopes = _require_made_by(graph.node, given, weights, outer, name)
    for output in graph.output:
        if not any(output.name in scope for scope in scopes):
            raise _damaged(name, f"no node makes the output {output.name!r}")


def _require_made_by(nodes: Sequence[onnx.NodeProto], given: set[str], weights: set[str], outer: _Scopes, name: str) -> _Scopes:
    made = set(given)
    for node in nodes:
        for output in filter(None, node.output):
            if output in made:
                raise _damaged(name, f"{_called(node)} makes {output!r}, which is there already")
            made.add(output)
    scopes = (*outer, made | weights)
    for node in nodes:
        for read in filter(None, node.input):
            if not any(read in scope for scope in scopes):
                raise _damaged(name, f"{_called(node)} reads {read!r}, which nothing makes")
        for body in _bodies(node):
            _require_made(body, scopes, name)
    return scopes


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _called(node: onnx.NodeProto) -> str:
    return f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"


def _damaged(name: str, reason: str) -> ExportError:
    return ExportError(f"{name} is not a valid ONNX model: {reason}; export it again")
