"""Types that ONNX's inference leaves open, from operators' signatures: forwards through nodes, backwards into their inputs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir

from export.onnx_fp16.element_types.control_flow import slots_of
from export.onnx_fp16.element_types.signatures import Formal, signature_of
from export.onnx_fp16.graph_walk import bodies

_NAMES = {
    "float": onnx_ir.DataType.FLOAT,
    "float16": onnx_ir.DataType.FLOAT16,
    **{name.lower(): member for name, member in onnx_ir.DataType.__members__.items() if name not in ("FLOAT", "UNDEFINED")},
}


def type_text(value: onnx_ir.Value) -> str:
    """A value's type as schemas write it, such as "seq(tensor(float))"; empty where it is unknown."""
    return _text(value.type)


def fill_from_signatures(model: onnx_ir.Model, declared: Mapping[onnx_ir.Value, onnx_ir.TypeProtocol]) -> None:
    """Set the types that are still open.

    Args:
        model: The model.
        declared: What the model's own value_info says; believed where nothing else is known.
    """
    for _ in range(2):  # what flows backwards out of a body is used by what stands before it
        _fill(model.graph, model.opset_imports, declared)


def _fill(graph: onnx_ir.Graph, opsets: Mapping[str, int], declared: Mapping[onnx_ir.Value, onnx_ir.TypeProtocol]) -> None:
    for value in graph.initializers.values():
        if value.type is None and value.const_value is not None:
            value.type = onnx_ir.TensorType(value.const_value.dtype)
    for node in graph:
        maps = node.op_type == "SequenceMap"
        for slot in slots_of(node):
            _share(slot.entering, slot.inside, enters_sequence=maps)
        for body in bodies(node):
            _fill(body, opsets, declared)
        for slot in slots_of(node):
            _share([*slot.leaving, *slot.inside], slot.results, leaves_body=maps)
        _fill_node(node, opsets)
        for value in node.outputs:
            if value.type is None and value in declared:
                value.type = declared[value]


def _share(
    sources: list[onnx_ir.Value], targets: list[onnx_ir.Value], *, enters_sequence: bool = False, leaves_body: bool = False
) -> None:
    """Give the targets the sources' type; SequenceMap's body sees a sequence's elements, and its results are gathered again."""
    known = next((value.type for value in sources if value.type is not None), None)
    if known is None:
        return
    if enters_sequence and isinstance(known, onnx_ir.SequenceType):
        known = known.elem_type
    for value in targets:
        if value.type is None:
            value.type = onnx_ir.SequenceType(_copy(known)) if leaves_body else _copy(known)


def _fill_node(node: onnx_ir.Node, opsets: Mapping[str, int]) -> None:
    signature = signature_of(node, opsets)
    if signature is None or (all(value.type for value in node.outputs) and all(v is None or v.type for v in node.inputs)):
        return
    places: list[tuple[onnx_ir.Value, Formal]] = []
    for actuals, formal_at in ((node.inputs, signature.input), (node.outputs, signature.output)):
        for index, value in enumerate(actuals):
            formal = formal_at(index)
            if value is not None and formal is not None and not (formal.variadic and not formal.homogeneous):
                places.append((value, formal))
    bound = {formal.type_str: value.type for value, formal in places if value.type is not None}
    for value, formal in places:
        if value.type is None:
            known = bound.get(formal.type_str)
            value.type = _copy(known) if known is not None else _only(formal.types)


def _only(types: frozenset[str]) -> onnx_ir.TypeProtocol | None:
    if len(types) != 1:
        return None
    (text,) = types
    return _parse(text)


def _parse(text: str) -> onnx_ir.TypeProtocol | None:
    head, _, rest = text.partition("(")
    inner = rest.removesuffix(")")
    if head == "tensor":
        dtype = _NAMES.get(inner)
        return onnx_ir.TensorType(dtype) if dtype is not None else None
    element = _parse(inner) if head in ("seq", "optional") else None
    if element is None:
        return None
    return onnx_ir.SequenceType(element) if head == "seq" else onnx_ir.OptionalType(element)


def _copy(known: onnx_ir.TypeProtocol) -> onnx_ir.TypeProtocol:
    if isinstance(known, onnx_ir.SequenceType | onnx_ir.OptionalType):
        return type(known)(_copy(known.elem_type), denotation=known.denotation)
    if isinstance(known, onnx_ir.SparseTensorType):
        return onnx_ir.SparseTensorType(known.dtype, denotation=known.denotation)
    return onnx_ir.TensorType(known.dtype, denotation=known.denotation)


def _text(known: onnx_ir.TypeProtocol | None) -> str:
    if known is None:
        return ""
    if isinstance(known, onnx_ir.SequenceType):
        return f"seq({_text(known.elem_type)})"
    if isinstance(known, onnx_ir.OptionalType):
        return f"optional({_text(known.elem_type)})"
    kind = "sparse_tensor" if isinstance(known, onnx_ir.SparseTensorType) else "tensor"
    return f"{kind}({known.dtype.name.lower()})"
