"""Which values become float16, and which nodes stay in float32 and why."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir

from export.onnx_fp16.element_types.control_flow import OPERATORS, Slot, slots_of
from export.onnx_fp16.element_types.signatures import Signature, signature_of
from export.onnx_fp16.element_types.ties import Ties
from export.onnx_fp16.graph_walk import FLOAT, FLOAT16, all_nodes, bodies, is_container, is_float
from export.onnx_fp16.planning.node_places import Places, half_places
from export.onnx_fp16.settings import Settings

# A Cast takes whatever comes; so does the first input of CastLike, whose second one says the type.
_TAKES_ANY = frozenset({("Cast", 0), ("CastLike", 0)})


@dataclass(kw_only=True, eq=False)
class Plan:
    """Decisions, made one after the other, each seen by those after it.

    Attributes:
        model: The model, with types inferred.
        settings: What the user asked for.
        places: Where each node could take and give float16.
        ties: Values that must agree.
        kept: Nodes that stay in float32, with the reason.
        unsupported: Those of them for which there is no float16 at all.
        single_groups: Groups of tied values that stay float32.
        saturated: Constants whose values beyond float16's range become its nearest number.
    """

    model: onnx_ir.Model
    settings: Settings
    places: dict[onnx_ir.Node, Places]
    ties: Ties
    kept: dict[onnx_ir.Node, str] = field(default_factory=dict)
    unsupported: set[onnx_ir.Node] = field(default_factory=set)
    single_groups: set[onnx_ir.Value] = field(default_factory=set)
    saturated: set[onnx_ir.Value] = field(default_factory=set)

    def __post_init__(self) -> None:
        slots = [slot for node in self.places for slot in slots_of(node)]
        self._entering = {(slot.node, index): slot for slot in slots for index in slot.entering_at}
        self._leaving = {place: slot for slot in slots for place in slot.leaving_at}

    def signature(self, node: onnx_ir.Node) -> Signature | None:
        """The signature of the node's operator at the model's opset."""
        return signature_of(node, self.model.opset_imports)

    def keep(self, node: onnx_ir.Node, reason: str) -> None:
        """Leave a node, with all that is in its bodies, in float32; the first reason stays."""
        self.kept.setdefault(node, reason)
        for slot in slots_of(node):
            for value in (*slot.inside, *slot.results):
                self.keep_group(value)
        for body in bodies(node):
            for inner in body:
                self.keep(inner, reason)

    def keep_group(self, value: onnx_ir.Value) -> None:
        """Leave a value that is tied to others, and with it those, in float32."""
        if is_float(value):
            self.single_groups.add(self.ties.group_of(value))

    def gives_half(self, value: onnx_ir.Value) -> bool:
        """Whether a float32 value will be float16 where it is made. Not for constants and casts: those give what is wanted."""
        node = value.producer()
        if node is None:
            if value.graph is self.model.graph:
                return not self._keeps_input(value)
            return self.ties.group_of(value) not in self.single_groups
        if node.op_type in OPERATORS and not node.domain:
            return self.ties.group_of(value) not in self.single_groups
        return node not in self.kept and self.places[node].outputs[value.index() or 0]

    def wanted(self, node: onnx_ir.Node, index: int) -> onnx_ir.DataType | None:
        """The type that a node takes at a float32 input; None where it takes either."""
        if (node.op_type, index) in _TAKES_ANY and not node.domain:
            return None
        if node.op_type in OPERATORS and not node.domain:
            return self._type_of_slot(self._entering.get((node, index)))
        half = node not in self.kept and self.places[node].inputs[index]
        return FLOAT16 if half else FLOAT

    def wanted_as_output(self, graph: onnx_ir.Graph, index: int) -> onnx_ir.DataType:
        """The type that a float32 output of a graph must have."""
        value = graph.outputs[index]
        if graph is self.model.graph:
            return FLOAT if self._keeps_output(value) else FLOAT16
        return self._type_of_slot(self._leaving.get((graph, index)))

    def _type_of_slot(self, slot: Slot | None) -> onnx_ir.DataType:
        if slot is None:
            return FLOAT
        return FLOAT if self.ties.group_of([*slot.inside, *slot.results][0]) in self.single_groups else FLOAT16

    def _keeps_input(self, value: onnx_ir.Value) -> bool:
        if is_container(value):
            return self.ties.group_of(value) in self.single_groups
        if self.settings.keeps(value.name):
            return True
        uses = [(node, index) for node, index in value.uses() if self._is_bound(node, index)]
        return bool(uses) and len(uses) == len(value.uses()) and not value.is_graph_output()

    def _keeps_output(self, value: onnx_ir.Value) -> bool:
        if is_container(value):
            return self.ties.group_of(value) in self.single_groups
        if self.settings.keeps(value.name):
            return True
        node = value.producer()
        if node is None:
            return value.is_graph_input() and self._keeps_input(value)
        if node.op_type in OPERATORS or node.domain not in self.model.opset_imports:
            return False
        return not self.places[node].outputs[value.index() or 0]

    def _is_bound(self, node: onnx_ir.Node, index: int) -> bool:
        """Whether the operator's signature takes nothing but float32 there."""
        if (node.op_type in OPERATORS or (node.op_type, index) in _TAKES_ANY) and not node.domain:
            return False
        return not self.places[node].inputs[index]


def blank_plan(model: onnx_ir.Model, settings: Settings) -> Plan:
    """A plan in which nothing is kept yet."""
    places = {node: half_places(node, model.opset_imports) for node in all_nodes(model)}
    return Plan(model=model, settings=settings, places=places, ties=Ties(model))
