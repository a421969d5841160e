"""Carries a plan out: changes types, weights and attributes, puts casts where types meet, and removes idle casts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir import AttributeType

from halfserve.export.half_types import HALF_TYPES
from halfserve.export.onnx_fp16.element_types import with_dtype
from halfserve.export.onnx_fp16.graph import FLOAT, TYPE_ATTRIBUTES, FreshNames, all_graphs, all_nodes, is_float
from halfserve.export.onnx_fp16.planning.plan import CastingPlan
from halfserve.export.onnx_fp16.planning.weights import WeightRange, halved, weight_of

_SUFFIX = {FLOAT: "float32", **{onnx_ir.DataType(half.elem_type): half.name for half in HALF_TYPES.values()}}
# These hold every number of a half type, so a cast there and back changes nothing.
_WIDER = frozenset({FLOAT, onnx_ir.DataType.DOUBLE})


class Caster:
    """Converts the model of a plan; `apply` is called once.

    Attributes:
        added: The number of Cast nodes added.
        halved: The weights that were rounded.
    """

    def __init__(self, plan: CastingPlan, ranges: WeightRange) -> None:
        self._plan = plan
        self._half_dtype = plan.half_dtype
        self._ranges = ranges
        self._names = FreshNames(plan.model)
        self._half: set[onnx_ir.Value] = set()
        self._copies: dict[tuple[onnx_ir.Value, onnx_ir.DataType], onnx_ir.Value] = {}
        self._wanted: dict[tuple[onnx_ir.Node, int], onnx_ir.DataType] = {}
        self._wanted_outputs: dict[tuple[onnx_ir.Graph, int], onnx_ir.DataType] = {}
        self._made: set[onnx_ir.Value] = set()
        self.added = 0
        self.halved: list[onnx_ir.Value] = []

    def apply(self) -> None:
        """Change the model."""
        demands = self._demands()
        flexible = self._flexible()
        self._choose(demands, flexible)
        for value in self._half:
            value.type = with_dtype(value.type, self._half_dtype)
        for node in list(all_nodes(self._plan.model)):
            if node.outputs and any(value in self._half for value in node.outputs):
                self._set_attributes(node)
        self._connect()

    def _demands(self) -> dict[onnx_ir.Value, set[onnx_ir.DataType]]:
        demands: dict[onnx_ir.Value, set[onnx_ir.DataType]] = defaultdict(set)
        for node in all_nodes(self._plan.model):
            for index, value in enumerate(node.inputs):
                if value is None or not is_float(value):
                    continue
                wanted = self._plan.wanted(node, index)
                if wanted is not None:
                    self._wanted[node, index] = wanted
                    demands[value].add(wanted)
        for graph in all_graphs(self._plan.model):
            for index, value in enumerate(graph.outputs):
                if is_float(value):
                    wanted = self._plan.wanted_as_output(graph, index)
                    self._wanted_outputs[graph, index] = wanted
                    demands[value].add(wanted)
        return demands

    def _flexible(self) -> set[onnx_ir.Value]:
        """Return the values that can have either type, or both: weights and results of casts."""
        plan, nodes = self._plan, list(all_nodes(self._plan.model))
        casts = {node.outputs[0] for node in nodes if _is_cast(node) and node not in plan.kept}
        made = [node.outputs[0] for node in nodes if node.op_type == "Constant" and node.outputs]
        stored = [value for graph in all_graphs(plan.model) for value in graph.initializers.values()]
        weights = {value for value in (*made, *stored) if weight_of(plan, value) is not None}
        return {value for value in casts if is_float(value)} | weights

    def _choose(self, demands: dict[onnx_ir.Value, set[onnx_ir.DataType]], flexible: set[onnx_ir.Value]) -> None:
        for graph in all_graphs(self._plan.model):
            for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
                if not is_float(value):
                    continue
                if value in flexible:
                    half = demands[value] == {self._half_dtype} and not self._has_half_source(value)
                else:
                    half = self._plan.gives_half(value)
                if half and value not in self._half:
                    self._half.add(value)
                    self._halve_weight(value)

    def _has_half_source(self, value: onnx_ir.Value) -> bool:
        """Return whether a value is cast from the half type, so that readers in that type can read that instead."""
        node = value.producer()
        source = node.inputs[0] if node is not None and _is_cast(node) else None
        return source is not None and (source in self._half or source.dtype == self._half_dtype)

    def _halve_weight(self, value: onnx_ir.Value) -> None:
        tensor = weight_of(self._plan, value)
        if tensor is None and value.is_initializer():
            tensor = value.const_value  # the default of an input
        if tensor is None:
            return
        half = halved(tensor, self._plan.half, saturate=value in self._plan.saturated)
        self._ranges.scan_of(value)
        self.halved.append(value)
        node = value.producer()
        if node is None:
            value.const_value = half
        else:
            value.const_value = None
            node.attributes["value"] = onnx_ir.AttrTensor("value", half)

    def _set_attributes(self, node: onnx_ir.Node) -> None:
        if node.op_type == "ConstantOfShape" and not node.domain:
            fill = node.attributes.get("value")
            tensor = fill.as_tensor() if fill is not None else onnx_ir.tensor(np.zeros(1, np.float32))
            if tensor.dtype == FLOAT:
                half = halved(tensor, self._plan.half, saturate=node.outputs[0] in self._plan.saturated)
                node.attributes["value"] = onnx_ir.AttrTensor("value", half)
            return
        signature = self._plan.signature(node)
        for name in TYPE_ATTRIBUTES:
            if signature is None or name not in signature.attributes:
                continue
            attribute = node.attributes.get(name)
            stated = attribute.as_int() if attribute is not None else signature.attributes[name]
            if node.op_type == "SequenceEmpty" and attribute is None:
                stated = FLOAT  # the default in the operator's documentation; its signature has none
            if stated == FLOAT:
                node.attributes[name] = onnx_ir.AttrInt64(name, self._half_dtype.value)
        stated_type = node.attributes.get("type")
        if stated_type is not None and stated_type.type == AttributeType.TYPE_PROTO:
            value = stated_type.value
            node.attributes["type"] = onnx_ir.AttrTypeProto(
                "type", onnx_ir.TypeAndShape(with_dtype(value.type, self._half_dtype), value.shape), stated_type.doc_string
            )

    def _connect(self) -> None:
        for (node, index), wanted in self._wanted.items():
            value = node.inputs[index]
            if value is not None:
                node.replace_input_with(index, self._as(value, wanted))
        for (graph, index), wanted in self._wanted_outputs.items():
            value = graph.outputs[index]
            if value.dtype != wanted:
                self._give_as_output(graph, index, wanted)

    def _as(self, value: onnx_ir.Value, wanted: onnx_ir.DataType) -> onnx_ir.Value:
        if value.dtype == wanted:
            return value
        if (value, wanted) not in self._copies:
            self._copies[value, wanted] = self._make(value, wanted)
        return self._copies[value, wanted]

    def _make(self, value: onnx_ir.Value, wanted: onnx_ir.DataType) -> onnx_ir.Value:
        node = value.producer()
        if weight_of(self._plan, value) is not None:
            return self._copied_weight(value)
        if node is not None and _is_cast(node) and node.inputs[0] is not None:
            source = node.inputs[0]
            if source.dtype == wanted:
                return source
            if wanted == self._half_dtype:
                return self._cast(source, wanted, after=value, like=value)
        return self._cast(value, wanted, after=value, like=value)

    def _copied_weight(self, value: onnx_ir.Value) -> onnx_ir.Value:
        """Return a half copy of a weight that is needed in float32 too."""
        tensor, graph, node = weight_of(self._plan, value), _home(value), value.producer()
        if tensor is None:
            raise ValueError(value.name)
        half = halved(tensor, self._plan.half, saturate=value in self._plan.saturated)
        self._ranges.scan_of(value)
        self.halved.append(value)
        copy = self._value(value, self._half_dtype)
        if node is None:
            half.name = copy.name
            copy.const_value = half
            graph.initializers.add(copy)
            if value.is_graph_input():  # formats before IR 4 list weights as inputs
                graph.inputs.append(copy)
        else:
            name = self._names.node(f"{node.name}_{self._plan.half.name}")
            attributes = [onnx_ir.AttrTensor("value", half)]
            clone = onnx_ir.Node(
                "", "Constant", [], attributes, outputs=[copy], name=name, metadata_props=dict(node.metadata_props)
            )
            graph.insert_after(node, clone)
        return copy

    def _cast(
        self, source: onnx_ir.Value, wanted: onnx_ir.DataType, *, after: onnx_ir.Value, like: onnx_ir.Value
    ) -> onnx_ir.Value:
        result = self._value(like, wanted)
        name = self._names.node(f"Cast_{result.name}")
        cast = onnx_ir.Node("", "Cast", [source], [onnx_ir.AttrInt64("to", wanted.value)], outputs=[result], name=name)
        self.added += 1
        producer, graph = after.producer(), _home(after)
        if producer is not None:
            graph.insert_after(producer, cast)
        elif len(graph):
            graph.insert_before(graph[0], cast)
        else:
            graph.append(cast)
        return result

    def _give_as_output(self, graph: onnx_ir.Graph, index: int, wanted: onnx_ir.DataType) -> None:
        """Replace a graph output by a converted value of the same name."""
        value = graph.outputs[index]
        if _home(value) is not graph or value.is_graph_input():  # a value of an outer graph, or an input
            graph.outputs[index] = self._in_place("Cast", value, graph, wanted)
            return
        name = value.name
        converted = self._as(value, wanted)
        if not (converted in self._made or converted.producer() is not None) or not _may_be_renamed(converted, graph):
            converted = self._in_place("Identity", converted, graph, wanted)
        for place, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[place] = converted
        value.name = self._names.value(f"{name}_{_SUFFIX[value.dtype or onnx_ir.DataType.UNDEFINED]}")
        converted.name = name
        if value.shape is not None:  # the interface may declare more than is known of a cast's source
            converted.shape = value.shape.copy()
        converted.metadata_props.update(value.metadata_props)
        converted.meta.update(value.meta)  # quantization annotations of the tensor of this name
        value.meta.clear()
        converted.doc_string, value.doc_string = value.doc_string, None

    def _in_place(self, op_type: str, source: onnx_ir.Value, graph: onnx_ir.Graph, wanted: onnx_ir.DataType) -> onnx_ir.Value:
        """Return a new value at the graph's end."""
        result = self._value(source, wanted)
        attributes = [onnx_ir.AttrInt64("to", wanted.value)] if op_type == "Cast" else []
        self.added += op_type == "Cast"
        name = self._names.node(f"{op_type}_{result.name}")
        graph.append(onnx_ir.Node("", op_type, [source], attributes, outputs=[result], name=name))
        return result

    def _value(self, like: onnx_ir.Value, dtype: onnx_ir.DataType) -> onnx_ir.Value:
        shape = like.shape.copy() if like.shape is not None else None
        name = self._names.value(f"{like.name}_{_SUFFIX[dtype]}")
        made = onnx_ir.Value(name=name, type=onnx_ir.TensorType(dtype), shape=shape)
        self._made.add(made)
        return made


def _is_cast(node: onnx_ir.Node) -> bool:
    return node.op_type == "Cast" and not node.domain


def _home(value: onnx_ir.Value) -> onnx_ir.Graph:
    graph = value.graph
    if not isinstance(graph, onnx_ir.Graph):
        raise TypeError(f"{value.name!r} belongs to no graph")
    return graph


def drop_idle_casts(model: onnx_ir.Model, half: onnx_ir.DataType) -> int:
    """Remove casts that change no number, and return how many: lossless pairs, duplicates, unread ones, those of equal types.

    Casts between other types than the half type stay.
    """
    removed = 0
    for graph in all_graphs(model):
        earlier: dict[tuple[onnx_ir.Value | None, frozenset[tuple[str, Any]]], onnx_ir.Value] = {}
        for node in list(graph):
            if node.op_type == "Cast" and not node.domain and _touches_half(node, half):
                # All attributes, not the type alone: two casts to float8 may differ in whether they saturate.
                key = node.inputs[0], frozenset((name, entry.value) for name, entry in node.attributes.items())
                removed += _simplify(graph, node, half, earlier.get(key))
                earlier.setdefault(key, node.outputs[0])
    for graph in all_graphs(model):
        for node in reversed(list(graph)):
            if node.op_type == "Cast" and not node.domain and _touches_half(node, half) and _is_dead(node):
                graph.remove(node, safe=True)
                removed += 1
    return removed


def _simplify(graph: onnx_ir.Graph, node: onnx_ir.Node, half: onnx_ir.DataType, duplicate: onnx_ir.Value | None) -> bool:
    source, result = node.inputs[0], node.outputs[0]
    if source is None or source.dtype is None:
        return False
    origin = _before_pair(source, half) if result.dtype == half else None
    equal = source if source.dtype == result.dtype else origin or duplicate
    if equal is None or equal is result:
        return False
    for user, index in list(result.uses()):
        user.replace_input_with(index, equal)
    if not result.is_graph_output():
        graph.remove(node, safe=True)
        return True
    if source.dtype != result.dtype and origin is None:
        return False  # a duplicate: the output needs a maker
    if equal.producer() is not None and _may_be_renamed(equal, graph):
        _replace_output(graph, result, equal)
        graph.remove(node, safe=True)
        return True
    identity = onnx_ir.Node("", "Identity", [equal], name=node.name, metadata_props=dict(node.metadata_props))
    graph.insert_after(node, identity)
    made = identity.outputs[0]
    made.type = result.type
    _replace_output(graph, result, made)
    graph.remove(node, safe=True)
    return True


def _may_be_renamed(value: onnx_ir.Value, graph: onnx_ir.Graph) -> bool:
    """Return whether a value may take an output's name: it is of the graph, and neither its input nor its output."""
    return value.graph is graph and not value.is_graph_output() and not value.is_graph_input()


def _replace_output(graph: onnx_ir.Graph, old: onnx_ir.Value, new: onnx_ir.Value) -> None:
    name, old.name = old.name, f"{old.name}/replaced"
    new.name, new.doc_string = name, old.doc_string
    if old.shape is not None:
        new.shape = old.shape
    new.metadata_props.update(old.metadata_props)
    new.meta.update(old.meta)
    for place, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[place] = new


def _before_pair(value: onnx_ir.Value, half: onnx_ir.DataType) -> onnx_ir.Value | None:
    """Return the half value from which a wider value was cast."""
    node = value.producer()
    if node is None or node.op_type != "Cast" or node.domain or value.dtype not in _WIDER:
        return None
    source = node.inputs[0]
    return source if source is not None and source.dtype == half else None


def _touches_half(node: onnx_ir.Node, half: onnx_ir.DataType) -> bool:
    source = node.inputs[0]
    return half in (node.outputs[0].dtype, source.dtype if source is not None else None)


def _is_dead(node: onnx_ir.Node) -> bool:
    result = node.outputs[0]
    return not result.uses() and not result.is_graph_output()
