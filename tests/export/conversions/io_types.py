"""The types that a converted model's inputs and outputs must have."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


def wrong_io_type(original: onnx.ModelProto, converted: onnx.ModelProto, *, keep_io: bool) -> str | None:
    """The error in the converted model's inputs and outputs; None if there is none.

    Names and order must stay. With `keep_io` all types must stay. Otherwise each float32 must become float16 (inside sequences
    and optionals too), but if a node that reads or writes the value does not accept float16 by its schema, either type is
    right.
    Inputs with an initializer are not checked: callers seldom feed these defaults, and in IR version 3 every weight is one.
    """
    initialized = {tensor.name for tensor in original.graph.initializer}
    free = set() if keep_io else _bound_by_schema(original)
    for what in ("input", "output"):
        befores, afters = (
            [value for value in getattr(model.graph, what) if what == "output" or value.name not in initialized]
            for model in (original, converted)
        )
        if [value.name for value in befores] != [value.name for value in afters]:
            return f"{what}s {[value.name for value in afters]} instead of {[value.name for value in befores]}"
        for before, after in zip(befores, afters, strict=True):
            wanted = {_text(before.type)} if keep_io else {_text(_halved(before.type))}
            if before.name in free:
                wanted.add(_text(before.type))
            if _text(after.type) not in wanted:
                return f"{what} {after.name!r} is {_text(after.type)} instead of {' or '.join(sorted(wanted))}"
    return None


def _bound_by_schema(model: onnx.ModelProto) -> set[str]:
    """Names of values that a node reads or writes where its schema does not accept a float16 tensor."""
    versions = {opset.domain: opset.version for opset in model.opset_import}
    bound: set[str] = set()
    for node in _nodes(model.graph):
        schema = _schema(node, versions)
        if schema is None:
            bound.update(node.input, node.output)
            continue
        variables = {variable.type_param_str: variable.allowed_type_strs for variable in schema.type_constraints}
        for names, formals in ((node.input, schema.inputs), (node.output, schema.outputs)):
            for i, name in enumerate(names):
                stated = formals[min(i, len(formals) - 1)].type_str
                types = variables.get(stated, (stated,))  # not `types` of the formal, which onnx 1.20 fails to give
                if not any("float16)" in text and "bfloat16)" not in text for text in types):
                    bound.add(name)
    return bound


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(body)


def _schema(node: onnx.NodeProto, versions: dict[str, int]) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return None


def _halved(type_proto: onnx.TypeProto) -> onnx.TypeProto:
    changed = onnx.TypeProto()
    changed.CopyFrom(type_proto)
    inner = changed
    while (kind := inner.WhichOneof("value")) in {"sequence_type", "optional_type"}:
        inner = getattr(inner, kind).elem_type
    if kind in {"tensor_type", "sparse_tensor_type"} and getattr(inner, kind).elem_type == FLOAT:
        getattr(inner, kind).elem_type = FLOAT16
    return changed


def _text(type_proto: onnx.TypeProto) -> str:
    kind = type_proto.WhichOneof("value")
    if kind in {"sequence_type", "optional_type"}:
        return f"{kind.removesuffix('_type')} of {_text(getattr(type_proto, kind).elem_type)}"
    if kind in {"tensor_type", "sparse_tensor_type"}:
        return TensorProto.DataType.Name(getattr(type_proto, kind).elem_type).lower()
    return str(kind)
