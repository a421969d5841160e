"""The element type of every value, bodies included, from operators' signatures and ONNX's inference.

ONNX's own inference comes first. Signatures fill in what it leaves open: operators of other domains, inputs of bodies. What the
model itself says about a value counts last. Signatures come from ONNX's schemas, and from ONNX Runtime's for its own domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx
import onnx_ir

from halfserve.export.half_types import HalfType
from halfserve.export.onnx_files.external_data import detached
from halfserve.export.onnx_files.proto_graphs import all_graphs as all_proto_graphs
from halfserve.export.onnx_files.proto_graphs import bodies as proto_bodies
from halfserve.export.onnx_fp16.graph import all_nodes, bodies, slots_of

# The opset to which a model may be raised: convolutions and pools take bfloat16 from it on, and later ones add little.
LAST_RAISED = 22
RUNTIME_DOMAINS = frozenset({"com.microsoft", "com.microsoft.nchwc"})
_NAMES = {
    "float": onnx_ir.DataType.FLOAT,
    "float16": onnx_ir.DataType.FLOAT16,
    **{name.lower(): member for name, member in onnx_ir.DataType.__members__.items() if name not in ("FLOAT", "UNDEFINED")},
}


@dataclass(frozen=True, kw_only=True)
class Formal:
    """A formal input or output of an operator.

    Attributes:
        type_str: A type variable such as "T", or a type such as "tensor(float)".
        types: The types that it may have, such as "seq(tensor(float16))".
        variadic: Whether it stands for any number of actual values; only the last formal may.
        homogeneous: Whether all values of a variadic formal have the same type.
    """

    type_str: str
    types: frozenset[str]
    variadic: bool
    homogeneous: bool


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs, outputs and integer attributes of an operator at one version.

    Attributes:
        inputs: Formal inputs.
        outputs: Formal outputs.
        attributes: Defaults of the integer attributes, by name; None where there is none.
    """

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, int | None]

    def input(self, index: int) -> Formal | None:
        """Return the formal of the actual input at an index."""
        return _at(self.inputs, index)

    def output(self, index: int) -> Formal | None:
        """Return the formal of the actual output at an index."""
        return _at(self.outputs, index)


def signature_of(node: onnx_ir.Node, opsets: Mapping[str, int]) -> Signature | None:
    """Return the signature of a node's operator at the model's opset of its domain; None where it is unknown."""
    return signature_named(node.domain, node.op_type, opsets)


def signature_named(domain: str, op_type: str, opsets: Mapping[str, int]) -> Signature | None:
    """Return the signature of the operator `domain:op_type`; None where it is unknown."""
    version = opsets.get(domain)
    if version is None and domain == "":
        version = opsets.get("ai.onnx")
    return _signature(domain, op_type, version if version is not None else 1)


def first_opset_with_half(node: onnx_ir.Node, opsets: Mapping[str, int], half: HalfType) -> int | None:
    """Return the first opset after the model's in which the operator takes the half type somewhere; None where no
    version does.
    """
    if node.domain:
        return None
    for version in range(opsets.get("", 1) + 1, onnx.defs.onnx_opset_version() + 1):
        signature = _signature("", node.op_type, version)
        if signature and any(f"tensor({half.name})" in formal.types for formal in (*signature.inputs, *signature.outputs)):
            return version
    return None


def takes_half(node: onnx_ir.Node, opsets: Mapping[str, int], half: HalfType) -> bool:
    """Return whether the operator takes the half type somewhere at the model's opset."""
    signature = signature_of(node, opsets)
    return signature is not None and any(
        f"tensor({half.name})" in formal.types for formal in (*signature.inputs, *signature.outputs)
    )


def _at(formals: Sequence[Formal], index: int) -> Formal | None:
    if index < len(formals):
        return formals[index]
    return formals[-1] if formals and formals[-1].variadic else None


@cache
def _signature(domain: str, op_type: str, version: int) -> Signature | None:
    try:
        schema: Any = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return _runtime_signatures().get((domain, op_type)) if domain in RUNTIME_DOMAINS else None
    types = _types_of(schema)
    defaults = {
        name: attribute.default_value.i if attribute.default_value.name else None
        for name, attribute in schema.attributes.items()
        if attribute.type == onnx.defs.OpSchema.AttrType.INT
    }
    return Signature(
        inputs=tuple(_formal(formal.type_str, formal, types) for formal in schema.inputs),
        outputs=tuple(_formal(formal.type_str, formal, types) for formal in schema.outputs),
        attributes=defaults,
    )


@cache
def _runtime_signatures() -> Mapping[tuple[str, str], Signature]:
    """Return the signatures of the installed ONNX Runtime's own operators; loaded only for models that use them."""
    from onnxruntime import capi  # noqa: PLC0415  (a tenth of a second; see above)

    runtime: Any = capi

    newest: dict[tuple[str, str], Any] = {}
    for schema in runtime.onnxruntime_pybind11_state.get_all_operator_schema():
        key = schema.domain, schema.name
        if schema.domain in RUNTIME_DOMAINS and (key not in newest or newest[key].since_version < schema.since_version):
            newest[key] = schema
    return {
        key: Signature(
            inputs=tuple(_formal(formal.typeStr, formal, _types_of(schema)) for formal in schema.inputs),
            outputs=tuple(_formal(formal.typeStr, formal, _types_of(schema)) for formal in schema.outputs),
            attributes=dict.fromkeys(schema.attributes),
        )
        for key, schema in newest.items()
    }


def _types_of(schema: Any) -> dict[str, frozenset[str]]:
    return {constraint.type_param_str: frozenset(constraint.allowed_type_strs) for constraint in schema.type_constraints}


def _formal(type_str: str, formal: Any, types: Mapping[str, frozenset[str]]) -> Formal:
    return Formal(
        type_str=type_str,
        types=types.get(type_str, frozenset({type_str})),
        variadic=formal.option.name == "Variadic",
        homogeneous=bool(getattr(formal, "is_homogeneous", getattr(formal, "isHomogeneous", True))),
    )


def _fill_from_signatures(model: onnx_ir.Model, declared: Mapping[onnx_ir.Value, onnx_ir.TypeProtocol]) -> None:
    """Set the types that inference left open, forwards through nodes and backwards into their inputs.

    Args:
        model: The model.
        declared: The types in the model's own value_info, used where nothing else is known.
    """
    for _ in range(2):  # types that flow backwards out of a body are used by the nodes before it
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
    """Give the targets the sources' type; SequenceMap's body reads a sequence's elements and makes elements of one."""
    known = next((value.type for value in sources if value.type is not None), None)
    if known is None:
        return
    if enters_sequence and isinstance(known, onnx_ir.SequenceType):
        known = known.elem_type
    for value in targets:
        if value.type is None:
            value.type = onnx_ir.SequenceType(with_dtype(known)) if leaves_body else with_dtype(known)


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
            value.type = with_dtype(known) if known is not None else _only_type(formal.types)


def _only_type(types: frozenset[str]) -> onnx_ir.TypeProtocol | None:
    return _parse(next(iter(types))) if len(types) == 1 else None


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


def with_dtype(known: onnx_ir.TypeProtocol | None, dtype: onnx_ir.DataType | None = None) -> onnx_ir.TypeProtocol:
    """Return a copy of a type, with another element type if one is given."""
    denotation = known.denotation if known is not None else None
    if isinstance(known, onnx_ir.SequenceType | onnx_ir.OptionalType):
        return type(known)(with_dtype(known.elem_type, dtype), denotation=denotation)
    element = dtype if dtype is not None or known is None else known.dtype
    if element is None:
        raise ValueError("a type needs an element type")
    kind = onnx_ir.SparseTensorType if isinstance(known, onnx_ir.SparseTensorType) else onnx_ir.TensorType
    return kind(element, denotation=denotation)


def type_text(known: onnx_ir.TypeProtocol | None) -> str:
    """Return a type as schemas write it, such as "seq(tensor(float))"; empty where it is unknown."""
    if known is None:
        return ""
    if isinstance(known, onnx_ir.SequenceType):
        return f"seq({type_text(known.elem_type)})"
    if isinstance(known, onnx_ir.OptionalType):
        return f"optional({type_text(known.elem_type)})"
    kind = "sparse_tensor" if isinstance(known, onnx_ir.SparseTensorType) else "tensor"
    return f"{kind}({known.dtype.name.lower()})"


def declared_values(model: onnx_ir.Model) -> set[onnx_ir.Value]:
    """Return the results of nodes for which the model states a type or shape, in value_info or as outputs."""
    return {value for node in all_nodes(model) for value in node.outputs if value.type is not None or value.shape is not None}


def forget_inferred(model: onnx_ir.Model, declared: set[onnx_ir.Value]) -> None:
    """Remove type and shape of results for which the original stated none, so that the file does not grow; not of outputs."""
    for node in all_nodes(model):
        for value in node.outputs:
            if value not in declared and not value.is_graph_output():
                value.type = value.shape = None


def infer_types(model: onnx_ir.Model) -> None:
    """Infer type and shape of every value; a contradicting shape is replaced."""
    with detached(model) as outline:
        proto = outline.proto
        for graph in all_proto_graphs(proto):
            del graph.value_info[:]
        try:
            inferred = onnx.shape_inference.infer_shapes(proto)  # propagating data costs minutes where long vectors are added
            if _note_ranks(proto, inferred):
                inferred = onnx.shape_inference.infer_shapes(proto)
        except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
            inferred = None  # contradictory, or too large for one message: signatures alone
    declared: dict[onnx_ir.Value, onnx_ir.TypeProtocol] = {}
    _forget_types(model.graph, declared, main=True)
    if inferred is not None:
        _take_over(model.graph, inferred.graph)
    _fill_from_signatures(model, declared)


def _note_ranks(proto: onnx.ModelProto, inferred: onnx.ModelProto) -> bool:
    """Declare the ranks of Reshape's results, which ONNX's inference leaves open: one dimension for each size.

    Returns:
        Whether there were any.
    """
    found = False
    for graph, known in zip(all_proto_graphs(proto), all_proto_graphs(inferred), strict=True):
        types = {info.name: info.type.tensor_type for info in (*known.input, *known.output, *known.value_info)}
        shapes = {name: kind.shape for name, kind in types.items() if kind.HasField("shape")}
        for node in known.node:
            if node.op_type != "Reshape" or node.domain or node.output[0] in shapes or len(node.input) < 2:
                continue
            sizes, kind = shapes.get(node.input[1]), types.get(node.output[0])
            if sizes is None or kind is None or len(sizes.dim) != 1 or not sizes.dim[0].dim_value:
                continue
            shape = [None] * sizes.dim[0].dim_value
            graph.value_info.append(onnx.helper.make_tensor_value_info(node.output[0], kind.elem_type, shape))
            found = True
    return found


def _forget_types(graph: onnx_ir.Graph, declared: dict[onnx_ir.Value, onnx_ir.TypeProtocol], *, main: bool) -> None:
    interface = {*graph.outputs} if main else set()
    for node in graph:
        for value in node.outputs:
            if value.type is not None and value not in interface:
                declared[value] = value.type
                value.type = None
        for body in bodies(node):
            _forget_types(body, declared, main=False)


def _take_over(graph: onnx_ir.Graph, proto: onnx.GraphProto) -> None:
    known = {info.name: info for info in [*proto.input, *proto.output, *proto.value_info]}
    for value in graph.inputs:
        _set(value, known.get(value.name or ""))
    for node, node_proto in zip(graph, proto.node, strict=True):
        for value in node.outputs:
            _set(value, known.get(value.name or ""))
        for body, body_proto in zip(bodies(node), proto_bodies(node_proto), strict=True):
            _take_over(body, body_proto)


def _set(value: onnx_ir.Value, info: onnx.ValueInfoProto | None) -> None:
    if info is None or not info.HasField("type") or info.type.WhichOneof("value") is None:
        return
    known = onnx_ir.serde.deserialize_type_proto_for_type(info.type)
    if known is None or known.dtype == onnx_ir.DataType.UNDEFINED:
        return
    shape = onnx_ir.serde.deserialize_type_proto_for_shape(info.type)
    if value.type is None or value.type != known:
        value.type = known
    if shape is not None and (value.shape is None or _contradict(value.shape, shape)):
        value.shape = shape


def _contradict(ours: onnx_ir.Shape, inferred: onnx_ir.Shape) -> bool:
    if len(ours) != len(inferred):
        return True
    pairs = zip(ours, inferred, strict=True)
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
