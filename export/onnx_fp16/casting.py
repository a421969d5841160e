"""Carries a plan out: types, weights and attributes change, and casts come in where types meet."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir
from onnx_ir import AttributeType

from export.onnx_fp16.cleanup import may_be_renamed
from export.onnx_fp16.graph_walk import FLOAT, FLOAT16, all_graphs, all_nodes, is_float
from export.onnx_fp16.half_tensors import halved
from export.onnx_fp16.names import FreshNames
from export.onnx_fp16.planning.node_places import TYPE_ATTRIBUTES
from export.onnx_fp16.planning.plan import Plan
from export.onnx_fp16.planning.weight_range import WeightRange, weight_of

_SUFFIX = {FLOAT: "float32", FLOAT16: "float16"}


class Caster:
    """Rewrites the model of a plan; `apply` is called once.

    Attributes:
        added: How many Cast nodes were added.
        halved: The weights that were rounded.
    """

    def __init__(self, plan: Plan, ranges: WeightRange) -> None:
        self._plan = plan
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
            value.type = _half_type(value.type)
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
        """Values that can be made in whichever type is wanted, or in both: weights and the results of casts."""
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
                    half = demands[value] == {FLOAT16} and not self._has_half_source(value)
                else:
                    half = self._plan.gives_half(value)
                if half and value not in self._half:
                    self._half.add(value)
                    self._halve_weight(value)

    def _has_half_source(self, value: onnx_ir.Value) -> bool:
        """Whether a value is a Cast's result whose input is float16, so that who wants float16 takes that instead."""
        node = value.producer()
        source = node.inputs[0] if node is not None and _is_cast(node) else None
        return source is not None and (source in self._half or source.dtype == FLOAT16)

    def _halve_weight(self, value: onnx_ir.Value) -> None:
        tensor = weight_of(self._plan, value)
        if tensor is None and value.is_initializer():
            tensor = value.const_value  # the default of an input
        if tensor is None:
            return
        half = halved(tensor, saturate=value in self._plan.saturated)
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
                half = halved(tensor, saturate=node.outputs[0] in self._plan.saturated)
                node.attributes["value"] = onnx_ir.AttrTensor("value", half)
            return
        signature = self._plan.signature(node)
        for name in TYPE_ATTRIBUTES:
            if signature is None or name not in signature.attributes:
                continue
            attribute = node.attributes.get(name)
            stated = attribute.as_int() if attribute is not None else signature.attributes[name]
            if node.op_type == "SequenceEmpty" and attribute is None:
                stated = FLOAT  # so the operator's text says; its signature is silent
            if stated == FLOAT:
                node.attributes[name] = onnx_ir.AttrInt64(name, FLOAT16.value)
        stated_type = node.attributes.get("type")
        if stated_type is not None and stated_type.type == AttributeType.TYPE_PROTO:
            value = stated_type.value
            node.attributes["type"] = onnx_ir.AttrTypeProto(
                "type", onnx_ir.TypeAndShape(_half_type(value.type), value.shape), stated_type.doc_string
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
            if wanted == FLOAT16:
                return self._cast(source, wanted, after=value, like=value)
        return self._cast(value, wanted, after=value, like=value)

    def _copied_weight(self, value: onnx_ir.Value) -> onnx_ir.Value:
        """A float16 copy of a weight that is wanted in float32 too."""
        tensor, graph, node = weight_of(self._plan, value), _home(value), value.producer()
        if tensor is None:
            raise ValueError(value.name)
        half = halved(tensor, saturate=value in self._plan.saturated)
        self._ranges.scan_of(value)
        self.halved.append(value)
        copy = self._value(value, FLOAT16)
        if node is None:
            half.name = copy.name
            copy.const_value = half
            graph.initializers.add(copy)
            if value.is_graph_input():  # the oldest format lists weights as inputs
                graph.inputs.append(copy)
        else:
            name = self._names.node(f"{node.name}_float16")
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
        """Put a converted value in an output's place, under the name that the output had."""
        value = graph.outputs[index]
        if _home(value) is not graph or value.is_graph_input():  # a body gives what it was given
            graph.outputs[index] = self._in_place("Cast", value, graph, wanted)
            return
        name = value.name
        converted = self._as(value, wanted)
        if not (converted in self._made or converted.producer() is not None) or not may_be_renamed(converted, graph):
            converted = self._in_place("Identity", converted, graph, wanted)
        for place, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[place] = converted
        value.name = self._names.value(f"{name}_{_SUFFIX[_dtype(value)]}")
        converted.name = name
        if value.shape is not None:  # a cast's own source may be known less well than what the interface declares
            converted.shape = value.shape.copy()
        converted.metadata_props.update(value.metadata_props)
        converted.meta.update(value.meta)  # what quantization says about the tensor of this name
        value.meta.clear()
        converted.doc_string, value.doc_string = value.doc_string, None

    def _in_place(self, op_type: str, source: onnx_ir.Value, graph: onnx_ir.Graph, wanted: onnx_ir.DataType) -> onnx_ir.Value:
        """A value of the graph itself, made at its end."""
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


def _dtype(value: onnx_ir.Value) -> onnx_ir.DataType:
    return value.dtype or onnx_ir.DataType.UNDEFINED


def _half_type(known: onnx_ir.TypeProtocol | None) -> onnx_ir.TypeProtocol:
    if isinstance(known, onnx_ir.SequenceType | onnx_ir.OptionalType):
        return type(known)(_half_type(known.elem_type), denotation=known.denotation)
    if isinstance(known, onnx_ir.SparseTensorType):
        return onnx_ir.SparseTensorType(FLOAT16, denotation=known.denotation)
    return onnx_ir.TensorType(FLOAT16, denotation=known.denotation if known is not None else None)
