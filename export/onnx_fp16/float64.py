"""Narrow float64 to float32 before the conversion: no runtime has an operator with float16 and float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import onnx_ir
from onnx_ir import AttributeType

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.element_types import signature_of, type_text, with_dtype
from halfserve.export.onnx_fp16.graph import (
    FLOAT,
    OPERATORS,
    TYPE_ATTRIBUTES,
    FreshNames,
    all_graphs,
    all_nodes,
    constant_of,
    is_container,
    slots_of,
)
from halfserve.export.onnx_fp16.planning.weights import narrowed

DOUBLE = onnx_ir.DataType.DOUBLE
NARROWED, STAYING = "narrow-float64", "keep-float64"
FIRST_OPSET_WITH_CASTS = 6  # first opset whose Cast states its type by number
_FEW = 8  # elements in constants of size and index arithmetic
_WIDTHS = (FLOAT, onnx_ir.DataType.FLOAT16, onnx_ir.DataType.BFLOAT16)


@dataclass(kw_only=True, eq=False)
class _Group:
    """Connected float64 values.

    Attributes:
        values: The values.
        nodes: The nodes that compute with them, without casts and constants.
        data: Whether they are the model's data, from or to inputs, outputs, weights or other floats. Values between integers
            are sizes and indices, which float64 keeps exact.
    """

    values: list[onnx_ir.Value] = field(default_factory=list)
    nodes: list[onnx_ir.Node] = field(default_factory=list)
    data: bool = False


def narrow_float64(model: onnx_ir.Model, settings: ConversionSettings) -> tuple[Repair, ...]:
    """Narrow float64 to float32 in place, where operators take float32; types must be known.

    Inputs and outputs that keep their types stay float64, with casts; the
    others become float32 too. Nodes that take only float64 stay, with casts around them, and so do sizes and indices that are
    computed in float64.

    Returns:
        The changes; empty where nothing computes in float64.

    Raises:
        ExportError: The model is from before opset 6, where Cast has another form.
    """
    groups = [group for group in _groups(model) if group.data and group.nodes]
    stubborn: dict[onnx_ir.Node, str] = {}
    for group in groups:
        bound = _bound_by_container(model, group, settings)
        reasons = {node: bound or _only_float64(node, model) for node in group.nodes}
        stubborn |= {node: reason for node, reason in reasons.items() if reason}
    groups = [group for group in groups if any(node not in stubborn for node in group.nodes)]
    if groups and model.opset_imports.get("", FIRST_OPSET_WITH_CASTS) < FIRST_OPSET_WITH_CASTS:
        raise ExportError(
            f"the model computes in float64 at opset {model.opset_imports['']}, whose Cast names types by text; raise the "
            f"opset to {FIRST_OPSET_WITH_CASTS} or later with onnx.version_converter"
        )
    names = FreshNames(model)
    for group in groups:
        _narrow(model, group, stubborn, settings, names)
    return tuple(_repairs(groups, stubborn))


def _repairs(groups: list[_Group], stubborn: dict[onnx_ir.Node, str]) -> Iterator[Repair]:
    if changed := [node for group in groups for node in group.nodes if node not in stubborn]:
        names = tuple(node.name or "" for node in changed)
        yield Repair(pass_name=NARROWED, nodes=names, text="computed in float64; converted through float32")
    for node, reason in stubborn.items():
        yield Repair(pass_name=STAYING, nodes=(node.name or "",), text=f"stays in float64: {reason}")


def _groups(model: onnx_ir.Model) -> list[_Group]:
    groups: dict[onnx_ir.Value, _Group] = {}
    for values in _ties(model):
        merged = _Group()
        for old in dict.fromkeys(groups[value] for value in values if value in groups):
            merged.values += old.values
        merged.values += [value for value in values if value not in groups]
        groups.update(dict.fromkeys(merged.values, merged))
    for node in all_nodes(model):
        doubles = _doubles((*node.inputs, *node.outputs))
        if doubles:
            group = groups[doubles[0]]
            group.data |= _moves_data(node)
            if node.op_type not in ("Cast", "Constant") or node.domain:
                group.nodes.append(node)
    for value, group in groups.items():
        tensor = constant_of(value)
        outside = value.graph is model.graph and (value.is_graph_input() or value.is_graph_output())
        group.data |= outside or (tensor is not None and tensor.size > _FEW)
    return list(dict.fromkeys(groups.values()))


def _ties(model: onnx_ir.Model) -> Iterator[list[onnx_ir.Value]]:
    """Float64 values that must have one type, by group; each value at least once."""
    for graph in all_graphs(model):
        for value in (*graph.inputs, *graph.initializers.values()):
            yield from ([one] for one in _doubles([value]))
    for node in all_nodes(model):
        doubles = _doubles((*node.inputs, *node.outputs))
        if doubles:
            yield doubles
        for slot in slots_of(node):
            sides = _doubles([*slot.entering, *slot.inside, *slot.leaving, *slot.results])
            if sides:
                yield sides


def _doubles(values: Iterable[onnx_ir.Value | None]) -> list[onnx_ir.Value]:
    return [value for value in values if value is not None and value.dtype == DOUBLE]


def _moves_data(node: onnx_ir.Node) -> bool:
    """Return whether data, rather than sizes and indices, enters or leaves float64 here."""
    takes, gives = _doubles(node.inputs), _doubles(node.outputs)
    if node.op_type in ("Cast", "CastLike"):
        other = node.outputs[0] if takes and not gives else node.inputs[0]
        return other is not None and other.dtype in _WIDTHS
    return not takes and node.op_type not in ("Constant", "ConstantOfShape", "Range", *OPERATORS)


def _bound_by_container(model: onnx_ir.Model, group: _Group, settings: ConversionSettings) -> str:
    """Return the reason why a group must stay: a sequence or optional in the interface keeps its type; else empty."""
    sides = {*model.graph.inputs, *model.graph.outputs}
    bound = next((v for v in group.values if v in sides and is_container(v) and settings.keeps(v.name)), None)
    return "" if bound is None else f"{bound.name!r} keeps its type, and no Cast converts a sequence or an optional"


def _only_float64(node: onnx_ir.Node, model: onnx_ir.Model) -> str:
    """Return the reason why a node takes only float64; empty where it takes float32."""
    operator = f"{node.domain}:{node.op_type}" if node.domain else node.op_type
    if node.op_type in OPERATORS and not node.domain:
        return ""
    if node.op_type == "BitCast" and not node.domain:
        return "BitCast reads or makes the bits of float64"
    signature = signature_of(node, model.opset_imports)
    if signature is None:
        return f"the types that {operator} takes are unknown"
    if node.op_type != "ConstantOfShape" and any(
        entry.type == AttributeType.TENSOR and not entry.is_ref() and entry.as_tensor().dtype == DOUBLE
        for entry in node.attributes.values()
    ):
        return f"the tables in the attributes of {operator} are float64"
    for values, formal_at in ((node.inputs, signature.input), (node.outputs, signature.output)):
        for index, value in enumerate(values):
            formal = formal_at(index)
            if value is None or value.dtype != DOUBLE or formal is None:
                continue
            text = "tensor(double)" if type(value.type) is onnx_ir.TensorType else type_text(value.type)
            if text.replace("(double)", "(float)") not in formal.types:
                return f"{operator} takes no float32"
    return ""


def _narrow(
    model: onnx_ir.Model, group: _Group, stubborn: dict[onnx_ir.Node, str], settings: ConversionSettings, names: FreshNames
) -> None:
    graph = model.graph
    borders = [node for node in group.nodes if node in stubborn]
    staying = {value for node in borders for value in node.outputs}
    staying |= {value for value in group.values if (uses := value.uses()) and all(use.node in stubborn for use in uses)}
    kept = {value for value in group.values if value in {*graph.inputs} - {*graph.initializers.values()}}
    kept = {value for value in kept if settings.keeps(value.name)}
    outputs = [value for value in dict.fromkeys(graph.outputs) if value in {*group.values} - kept - staying]
    for value in group.values:
        if value in kept:
            _cast_behind(value, FLOAT, names, graph)
        elif value not in staying:
            _retype(value)
    for value in outputs:
        if settings.keeps(value.name):
            _give_double(graph, value, names)
    for node in borders:
        _set_apart(node, {*group.values}, names, graph)


def _set_apart(node: onnx_ir.Node, narrowed_values: set[onnx_ir.Value], names: FreshNames, main: onnx_ir.Graph) -> None:
    """Put casts around a node that takes only float64."""
    for index, value in enumerate(node.inputs):
        if value is not None and value in narrowed_values and value.dtype == FLOAT:
            node.replace_input_with(index, _cast(value, DOUBLE, names, node))
    for value in node.outputs:
        if value.dtype == DOUBLE:
            _cast_behind(value, FLOAT, names, main)


def _retype(value: onnx_ir.Value) -> None:
    value.type = with_dtype(value.type, FLOAT)
    if value.const_value is not None and value.const_value.dtype == DOUBLE:
        value.const_value = narrowed(value.const_value)
    node = value.producer()
    if node is None or node.domain:
        return
    if node.op_type in ("Constant", "ConstantOfShape"):
        tensor = node.attributes["value"].as_tensor()
        node.attributes["value"] = onnx_ir.AttrTensor("value", narrowed(tensor))
    for name in TYPE_ATTRIBUTES:
        stated = node.attributes.get(name)
        if stated is not None and stated.type == AttributeType.INT and stated.as_int() == DOUBLE.value:
            node.attributes[name] = onnx_ir.AttrInt64(name, FLOAT.value)
    stated = node.attributes.get("type")
    if stated is not None and stated.type == AttributeType.TYPE_PROTO:
        entry = onnx_ir.TypeAndShape(with_dtype(stated.value.type, FLOAT), stated.value.shape)
        node.attributes["type"] = onnx_ir.AttrTypeProto("type", entry, stated.doc_string)


def _cast(value: onnx_ir.Value, to: onnx_ir.DataType, names: FreshNames, before: onnx_ir.Node | None = None) -> onnx_ir.Value:
    shape = value.shape.copy() if value.shape is not None else None
    made = onnx_ir.Value(name=names.value(f"{value.name}_{to.name.lower()}"), type=onnx_ir.TensorType(to), shape=shape)
    name = names.node(f"Cast_{made.name}")
    node = onnx_ir.Node("", "Cast", [value], [onnx_ir.AttrInt64("to", to.value)], outputs=[made], name=name)
    if before is not None and before.graph is not None:
        before.graph.insert_before(before, node)
    return made


def _cast_behind(value: onnx_ir.Value, to: onnx_ir.DataType, names: FreshNames, main: onnx_ir.Graph) -> None:
    """Let all nodes that read a value read a cast of it; graph outputs stay."""
    uses = list(value.uses())
    if not uses:
        return
    made = _cast(value, to, names)
    maker, node = value.producer(), made.producer()
    graph = value.graph if isinstance(value.graph, onnx_ir.Graph) else main
    if node is None:
        raise ValueError(value.name)
    if maker is not None:
        graph.insert_after(maker, node)
    else:
        graph.insert_before(graph[0], node)
    for use in uses:
        use.node.replace_input_with(use.idx, made)


def _give_double(graph: onnx_ir.Graph, value: onnx_ir.Value, names: FreshNames) -> None:
    """Replace a graph output by a cast of the same name."""
    name = value.name
    made = _cast(value, DOUBLE, names)
    node = made.producer()
    if node is None:
        raise ValueError(name)
    graph.append(node)
    for place, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[place] = made
    value.name = names.value(f"{name}_float32")
    made.name = name
    made.metadata_props.update(value.metadata_props)
    made.doc_string, value.doc_string = value.doc_string, None
