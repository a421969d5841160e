"""Names that nothing in a model has yet, made the same way every time."""

from __future__ import annotations

import onnx_ir

from export.onnx_fp16.graph_walk import all_graphs, all_nodes


class FreshNames:
    """Gives out names for values and nodes. A body's names must differ from the outer graph's."""

    def __init__(self, model: onnx_ir.Model) -> None:
        self._values = {name for graph in all_graphs(model) for name in _value_names(graph)}
        self._nodes = {node.name for node in all_nodes(model) if node.name}

    def value(self, wanted: str) -> str:
        """A name for a value: the wanted one, or with a number behind it."""
        return _fresh(wanted, self._values)

    def node(self, wanted: str) -> str:
        """A name for a node."""
        return _fresh(wanted, self._nodes)


def name_nodes(model: onnx_ir.Model) -> None:
    """Give each node without a name one, after its operator and its place; names that are there stay."""
    names = FreshNames(model)
    for index, node in enumerate(all_nodes(model)):
        if not node.name:
            node.name = names.node(f"{node.op_type}_{index}")


def _value_names(graph: onnx_ir.Graph) -> set[str]:
    values = [*graph.inputs, *graph.initializers.values(), *graph.outputs, *(v for node in graph for v in node.outputs)]
    return {value.name for value in values if value.name}


def _fresh(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name
