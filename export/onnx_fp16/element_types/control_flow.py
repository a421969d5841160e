"""How values pass in and out of the bodies of If, Loop, Scan and SequenceMap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir

from export.onnx_fp16.graph_walk import bodies

OPERATORS = frozenset({"If", "Loop", "Scan", "SequenceMap"})


@dataclass(kw_only=True, eq=False)
class Slot:
    """Values that are one variable seen from different sides, and therefore have one element type.

    Attributes:
        node: The node whose bodies these are.
        entering: What the node takes: (input index, value).
        inside: Inputs of its bodies.
        leaving: What its bodies give: (body, output index, value).
        results: Outputs of the node.
    """

    node: onnx_ir.Node
    entering_at: list[int] = field(default_factory=list)
    inside: list[onnx_ir.Value] = field(default_factory=list)
    leaving_at: list[tuple[onnx_ir.Graph, int]] = field(default_factory=list)
    results: list[onnx_ir.Value] = field(default_factory=list)

    @property
    def entering(self) -> list[onnx_ir.Value]:
        """The values that enter."""
        values = (self.node.inputs[index] for index in self.entering_at)
        return [value for value in values if value is not None]

    @property
    def leaving(self) -> list[onnx_ir.Value]:
        """The values that bodies give."""
        return [body.outputs[index] for body, index in self.leaving_at]


def slots_of(node: onnx_ir.Node) -> Iterator[Slot]:
    """The variables of a node with bodies; none for any other node."""
    if node.domain or node.op_type not in OPERATORS:
        return
    graphs = list(bodies(node))
    if node.op_type == "If":
        for index, result in enumerate(node.outputs):
            yield Slot(node=node, leaving_at=[(graph, index) for graph in graphs], results=[result])
    elif node.op_type == "Loop":
        yield from _loop_slots(node, graphs[0], first=2, carried=len(graphs[0].inputs) - 2, body_first_in=2, body_first_out=1)
    elif node.op_type == "Scan":
        scanned = node.attributes.get_int("num_scan_inputs", 0)
        first = 1 if len(node.inputs) > len(graphs[0].inputs) else 0  # Scan-8 has sequence_lens in front
        carried = len(graphs[0].inputs) - scanned
        yield from _loop_slots(node, graphs[0], first=first, carried=carried, body_first_in=0, body_first_out=0)
        for index in range(carried, len(graphs[0].inputs)):
            yield Slot(node=node, entering_at=[first + index], inside=[graphs[0].inputs[index]])
    else:
        yield from _map_slots(node, graphs[0])


def _loop_slots(
    node: onnx_ir.Node, body: onnx_ir.Graph, *, first: int, carried: int, body_first_in: int, body_first_out: int
) -> Iterator[Slot]:
    for index, result in enumerate(node.outputs):
        slot = Slot(node=node, leaving_at=[(body, body_first_out + index)], results=[result])
        if index < carried:
            slot.entering_at.append(first + index)
            slot.inside.append(body.inputs[body_first_in + index])
        yield slot


def _map_slots(node: onnx_ir.Node, body: onnx_ir.Graph) -> Iterator[Slot]:
    for index, inside in enumerate(body.inputs):
        yield Slot(node=node, entering_at=[index], inside=[inside])
    for index, result in enumerate(node.outputs):
        yield Slot(node=node, leaving_at=[(body, index)], results=[result])
