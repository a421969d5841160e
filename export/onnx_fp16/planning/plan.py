"""The plan of a conversion: which nodes stay float32 and why, and which values must have one type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.half_types import HALF_BY_ELEM_TYPE, HalfType
from halfserve.export.onnx_fp16.element_types import Formal, Signature, signature_of, type_text
from halfserve.export.onnx_fp16.graph import (
    FLOAT,
    OPERATORS,
    Slot,
    all_nodes,
    bodies,
    is_container,
    is_float,
    slots_of,
)

KEEP_FP32 = "halfserve.keep"  # metadata of a node that a user or a repair keeps in float32: the reason
# Cast takes any type; so does the first input of CastLike, whose second input determines the type.
_TAKES_ANY = frozenset({("Cast", 0), ("CastLike", 0)})


class Ties:
    """Groups of float32 values that must have one element type: a union-find.

    A Cast converts a tensor, so each use of a tensor may have another type. No Cast converts a sequence or an optional: those
    that flow into each other are one group. So are a loop variable's two sides, its body's input and the node's result.
    """

    def __init__(self, model: onnx_ir.Model) -> None:
        self._parent: dict[onnx_ir.Value, onnx_ir.Value] = {}
        for node in all_nodes(model):
            self._tie([value for value in (*node.inputs, *node.outputs) if value is not None and is_container(value)])
            for slot in slots_of(node):
                sides = [*slot.inside, *slot.results]
                self._tie(sides)
                through = [value for value in (*slot.entering, *slot.leaving) if is_container(value)]
                self._tie([*sides, *through])

    def group_of(self, value: onnx_ir.Value) -> onnx_ir.Value:
        """Return the value that represents the group."""
        root = value
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        self._parent[value] = root
        return root

    def _tie(self, values: Iterable[onnx_ir.Value]) -> None:
        floats = [value for value in values if is_float(value)]
        for value in floats[1:]:
            ours, theirs = self.group_of(floats[0]), self.group_of(value)
            if ours is not theirs:
                self._parent[theirs] = ours


@dataclass(frozen=True, kw_only=True)
class Places:
    """Whether each input and output of a node, by index, is float32 now and can be of the half type."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]

    @property
    def some(self) -> bool:
        return any(self.inputs) or any(self.outputs)


def half_places(node: onnx_ir.Node, opsets: Mapping[str, int], half: HalfType) -> Places:
    signature = signature_of(node, opsets)
    if signature is None:
        return Places(inputs=(False,) * len(node.inputs), outputs=(False,) * len(node.outputs))
    return Places(
        inputs=tuple(_can_be_half(value, signature.input(index), half) for index, value in enumerate(node.inputs)),
        outputs=tuple(_can_be_half(value, signature.output(index), half) for index, value in enumerate(node.outputs)),
    )


def computes_on_floats(node: onnx_ir.Node) -> bool:
    """Return whether any input or output is float32 or half precision."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None and value.type is not None]
    return any(value.dtype == FLOAT or value.dtype in HALF_BY_ELEM_TYPE for value in values)


def _can_be_half(value: onnx_ir.Value | None, formal: Formal | None, half: HalfType) -> bool:
    if value is None or formal is None or not is_float(value):
        return False
    text = "tensor(float)" if type(value.type) is onnx_ir.TensorType else type_text(value.type)
    return text.replace("tensor(float)", f"tensor({half.name})") in formal.types


@dataclass(kw_only=True, eq=False)
class CastingPlan:
    """The decisions, in the order in which they are made; later ones depend on earlier ones.

    Attributes:
        model: The model, with types inferred.
        settings: The user's settings.
        places: The inputs and outputs of each node that can be of the half type.
        ties: Values that must have one type.
        kept: Nodes that stay in float32, with the reason.
        unsupported: Kept nodes whose operators do not take the half type.
        single_groups: Groups of tied values that stay float32.
        saturated: Constants whose values beyond the half type's range become its nearest number.
    """

    model: onnx_ir.Model
    settings: ConversionSettings
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
        self.half_dtype = onnx_ir.DataType(self.half.elem_type)

    @property
    def half(self) -> HalfType:
        return self.settings.half

    def signature(self, node: onnx_ir.Node) -> Signature | None:
        return signature_of(node, self.model.opset_imports)

    def keep(self, node: onnx_ir.Node, reason: str) -> None:
        """Keep a node and its bodies in float32; the first reason stays."""
        self.kept.setdefault(node, reason)
        for slot in slots_of(node):
            for value in (*slot.inside, *slot.results):
                self.keep_group(value)
        for body in bodies(node):
            for inner in body:
                self.keep(inner, reason)

    def keep_group(self, value: onnx_ir.Value) -> None:
        """Keep a value and all values tied to it in float32."""
        if is_float(value):
            self.single_groups.add(self.ties.group_of(value))

    def gives_half(self, value: onnx_ir.Value) -> bool:
        """Return whether a float32 value will be half where it is made. Not for constants and casts, which can have either
        type.
        """
        node = value.producer()
        if node is None:
            if value.graph is self.model.graph:
                return not self._keeps_input(value)
            return self.ties.group_of(value) not in self.single_groups
        if node.op_type in OPERATORS and not node.domain:
            return self.ties.group_of(value) not in self.single_groups
        return node not in self.kept and self.places[node].outputs[value.index() or 0]

    def wanted(self, node: onnx_ir.Node, index: int) -> onnx_ir.DataType | None:
        """Return the type that a node needs at a float32 input; None where it takes either."""
        if (node.op_type, index) in _TAKES_ANY and not node.domain:
            return None
        if node.op_type in OPERATORS and not node.domain:
            return self._type_of_slot(self._entering.get((node, index)))
        half = node not in self.kept and self.places[node].inputs[index]
        return self.half_dtype if half else FLOAT

    def wanted_as_output(self, graph: onnx_ir.Graph, index: int) -> onnx_ir.DataType:
        """Return the type that a float32 output of a graph must have."""
        value = graph.outputs[index]
        if graph is self.model.graph:
            return FLOAT if self._keeps_output(value) else self.half_dtype
        return self._type_of_slot(self._leaving.get((graph, index)))

    def _type_of_slot(self, slot: Slot | None) -> onnx_ir.DataType:
        if slot is None:
            return FLOAT
        return FLOAT if self.ties.group_of([*slot.inside, *slot.results][0]) in self.single_groups else self.half_dtype

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
        """Return whether the operator takes only float32 at this input."""
        if (node.op_type in OPERATORS or (node.op_type, index) in _TAKES_ANY) and not node.domain:
            return False
        return not self.places[node].inputs[index]


def blank_plan(model: onnx_ir.Model, settings: ConversionSettings) -> CastingPlan:
    places = {node: half_places(node, model.opset_imports, settings.half) for node in all_nodes(model)}
    return CastingPlan(model=model, settings=settings, places=places, ties=Ties(model))
