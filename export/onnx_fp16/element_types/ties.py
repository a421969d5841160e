"""Values that must have one element type, however they are connected: a union-find."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir

from export.onnx_fp16.element_types.control_flow import slots_of
from export.onnx_fp16.graph_walk import all_nodes, is_container, is_float


class Ties:
    """Groups of float32 values.

    A Cast converts a tensor, so a tensor may change its type wherever it flows. A sequence or an optional cannot: all that
    flow into each other are one group. So are the two sides of a variable of a loop, its body's input and the node's result.
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
        """The value that stands for the group."""
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
