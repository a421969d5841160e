"""Checks of every ONNX model before use: versions, operators, graphs, nodes and tensors."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir
from onnx.defs import OpSchema

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.proto_graphs import all_graphs, all_nodes, bodies
from halfserve.files.onnx_tensors import all_tensors

OLDEST_IR_VERSION = 3
HEAD_BYTES = 32  # bytes at a file's start, for `no_model`
_HEADS = {
    b"version https://git-lfs": "it is a Git LFS pointer: run `git lfs pull`",
    b"PK\x03\x04": "it is a zip archive, as PyTorch checkpoints are: see `halfserve export`",
    b"\x1f\x8b": "it is compressed: unpack it first",
    b"\x89HDF": "it is an HDF5 file: export it to ONNX first",
    b"<!DOCTYPE": "it is a web page: the download went wrong",
    b"<html": "it is a web page: the download went wrong",
}
_Scopes: TypeAlias = tuple[set[str], ...]  # the values of a graph, and of those around it
_TENSOR_TYPES = frozenset(onnx.TensorProto.DataType.values())
_ONNX_DOMAINS = ("", "ai.onnx")
_BODIES = {"Loop": ("body",), "Scan": ("body",), "SequenceMap": ("body",), "If": ("then_branch", "else_branch")}
PACKED_BITS = (2, 4)  # sizes of elements that share bytes, in int32_data too
_KINDS = onnx.TensorProto
# The typed field of an element type, and its entries per element; all other types are in int32_data.
_FIELDS: dict[int, tuple[str, int]] = {
    _KINDS.FLOAT: ("float_data", 1),
    _KINDS.COMPLEX64: ("float_data", 2),
    _KINDS.DOUBLE: ("double_data", 1),
    _KINDS.COMPLEX128: ("double_data", 2),
    _KINDS.INT64: ("int64_data", 1),
    _KINDS.UINT32: ("uint64_data", 1),
    _KINDS.UINT64: ("uint64_data", 1),
    _KINDS.STRING: ("string_data", 1),
}


def no_model(name: str, head: bytes, reason: str = "") -> ExportError:
    """Return the error for bytes that are no ONNX model, with a guess by their head at what they are, else the `reason`."""
    guess = next((text for start, text in _HEADS.items() if head.startswith(start)), reason)
    return ExportError(f"{name} is not an ONNX model or is damaged" + (f": {guess}" if guess else ""))


def require_sound(model: onnx.ModelProto, name: str) -> None:
    """Check that a model is complete, of versions that the installed onnx knows, and made of operators that exist.

    onnx_ir, on which the converter works, needs more of a graph than operators that exist.

    Raises:
        ExportError: The model is not valid; the text says why and what to do.
    """
    if not model.HasField("graph"):
        raise no_model(name, b"", "it has no graph")
    if not model.graph.output:
        raise no_model(name, b"", "it has no outputs")
    if model.ir_version > onnx.IR_VERSION:
        raise ExportError(
            f"{name} has IR version {model.ir_version}; onnx {onnx.__version__} knows up to {onnx.IR_VERSION}; upgrade onnx"
        )
    if model.ir_version < OLDEST_IR_VERSION or not model.opset_import:
        raise ExportError(
            f"{name} has IR version {model.ir_version} and opsets {_opsets(model) or 'none'}; "
            f"expected IR {OLDEST_IR_VERSION} or later and an opset: export the model again"
        )
    newest = onnx.defs.onnx_opset_version()
    opset = _opsets(model).get("", 0)
    if opset > newest:
        raise ExportError(f"{name} has opset {opset}; onnx {onnx.__version__} knows up to {newest}; upgrade onnx")
    _require_known_operators(model, name, opset)
    require_sound_graphs(model, name)
    require_complete_nodes(model, name, _schemas(model, opset))
    require_whole_tensors(model, name)


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}


def _schemas(model: onnx.ModelProto, opset: int) -> Callable[[str], onnx.defs.OpSchema | None]:
    """Return a lookup of ONNX's operators that the model does not define itself."""
    own = _own_operators(model)
    return cache(lambda op_type: None if op_type in own else onnx.defs.get_schema(op_type, opset, ""))


def _own_operators(model: onnx.ModelProto) -> set[str]:
    """Return operators of ONNX's domain that the model defines by functions of its own."""
    return {function.name for function in model.functions if function.domain in _ONNX_DOMAINS}


def _require_known_operators(model: onnx.ModelProto, name: str, opset: int) -> None:
    own = _own_operators(model)
    used: dict[str, onnx.NodeProto] = {}
    for node in all_nodes(model):
        if node.domain in _ONNX_DOMAINS:
            used.setdefault(node.op_type, node)
    for op_type, node in used.items():
        if op_type in own:
            continue
        where = f"{name}: node {node.name or next(iter(node.output), '')!r} is a {op_type!r}"
        if not opset:
            raise ExportError(f"{where}, but the model imports no opset of ONNX's own operators; export it again")
        try:
            onnx.defs.get_schema(op_type, opset, "")
        except onnx.defs.SchemaError as error:
            raise ExportError(f"{where}, which ONNX's opset {opset} does not have{_hint(op_type)}") from error


def _hint(op_type: str) -> str:
    known = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    if op_type in known:
        return "; it came later: raise the model's opset, or export it again"
    near = difflib.get_close_matches(op_type, known, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{meant}; give an operator of your own a domain of its own"


def require_sound_graphs(model: onnx.ModelProto, name: str) -> None:
    """Check that every value has one maker, and that all types can be converted.

    Raises:
        ExportError: The model is not valid; the text says why.
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
    """Check a graph; a body may read values of the graphs around it."""
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
        for body in bodies(node):
            _require_made(body, scopes, name)
    return scopes


def _called(node: onnx.NodeProto) -> str:
    return f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"


def _damaged(name: str, reason: str) -> ExportError:
    return ExportError(f"{name} is not a valid ONNX model: {reason}; export it again")


def require_complete_nodes(model: onnx.ModelProto, name: str, schema_of: Callable[[str], OpSchema | None]) -> None:
    """Check that nodes have the inputs, outputs, attributes and bodies that their operators need.

    Nodes of functions are not checked: they may have another opset. `schema_of` returns None for an operator of the model's
    own.

    Raises:
        ExportError: A node is incomplete; the text says why.
    """
    for graph in all_graphs(model):
        for node in graph.node:
            schema = schema_of(node.op_type) if node.domain in _ONNX_DOMAINS else None
            reason = None if schema is None else _lack(node, schema) or _body_fault(node)
            if reason is not None:
                raise _damaged(name, f"{_called(node)} {reason}")


def _lack(node: onnx.NodeProto, schema: OpSchema) -> str | None:
    for what, found, least in (("inputs", node.input, schema.min_input), ("outputs", node.output, schema.min_output)):
        if len(found) < least:
            return f"has {len(found)} {what}, expected {least} or more"
    given = {attribute.name: attribute for attribute in node.attribute}
    for key, wanted in schema.attributes.items():
        attribute = given.get(key)
        if attribute is None:
            if wanted.required:
                return f"lacks its attribute {key!r}"
        elif not attribute.ref_attr_name and attribute.type != wanted.type.value:  # type: ignore[attr-defined]  # (not in its stubs)
            return f"has the attribute {key!r} of another type than its operator's"
    return None


def _body_fault(node: onnx.NodeProto) -> str | None:
    """Return a body with more inputs than the node, or fewer outputs."""
    for attribute in node.attribute:
        if attribute.name not in _BODIES.get(node.op_type, ()):
            continue
        takes = len(attribute.g.input)
        gives = len(attribute.g.output) - (node.op_type == "Loop")  # the first is the loop's condition
        if node.op_type != "If" and takes > len(node.input):
            return f"has {len(node.input)} inputs, but its body takes {takes}"
        if gives < len(node.output):
            return f"has {len(node.output)} outputs, but its {attribute.name!r} gives {max(gives, 0)}"
    return None


def require_whole_tensors(model: onnx.ModelProto, name: str) -> None:
    """Check that tensors in the model's own file have as many values as type and shape state.

    A reader would fill up a short one with the bytes behind it in the file: another weight's. See `stored_at` for data files.

    Raises:
        ExportError: A tensor has no type, a negative size, or another number of values.
    """
    for tensor in all_tensors(model):
        reason = _fault(tensor)
        if reason is not None:
            raise _damaged(name, f"the tensor {tensor.name!r} {reason}")


def _fault(tensor: onnx.TensorProto) -> str | None:
    if tensor.data_type == _KINDS.UNDEFINED:
        return "states no element type"
    if any(size < 0 for size in tensor.dims):
        return f"has the shape {list(tensor.dims)}"
    elements = math.prod(tensor.dims)
    if tensor.data_location == _KINDS.EXTERNAL or tensor.HasField("raw_data"):
        return _bytes_fault(tensor, elements)
    field, per_element = _FIELDS.get(tensor.data_type, ("int32_data", 1))
    found, expected = len(getattr(tensor, field)), elements * per_element
    if field == "int32_data" and _bits(tensor) in PACKED_BITS:
        expected = -(-elements * (_bits(tensor) or 0) // 8)
    if found != expected:
        return f"has {found:,} values in {field}, its type and shape say {expected:,}"
    return None


def _bytes_fault(tensor: onnx.TensorProto, elements: int) -> str | None:
    bits = _bits(tensor)
    if bits is None:
        return "has values as bytes, which its element type cannot have"
    found = len(tensor.raw_data)
    if tensor.data_location == _KINDS.EXTERNAL:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if not Path(entries.get("location", "")).is_absolute():  # in a data file: see `external_data.stored_at`
            return None
        found = int(entries["length"]) if entries.get("length", "").isdecimal() else found  # left in the model's own file
    if bits % 8 and bits not in PACKED_BITS:  # float6, which some tools do not pack
        return None
    expected = -(-elements * bits // 8)
    return None if found == expected else f"has {found:,} bytes, its type and shape say {expected:,}"


def _bits(tensor: onnx.TensorProto) -> int | None:
    """Bits of one element; None where it has no fixed size."""
    try:
        return onnx_ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError):
        return None
