"""Which integer attributes of a model's nodes hold a tensor type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from onnx import FunctionProto, NodeProto

# Over all operators of the standard and of ONNX Runtime's own domain.
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "precision", "softmax_precision", "output_datatype"})


class TypeAttributes:
    """Knows the operators, and what a model's own functions hand on to them under names of their own."""

    def __init__(self, functions: Sequence[FunctionProto]) -> None:
        """Look through a model's functions.

        Args:
            functions: all that the model has; they may call each other.
        """
        self._by_function: dict[tuple[str, str, str], AbstractSet[str]] = {
            _key(function): frozenset() for function in functions
        }
        grows = True
        while grows:
            grows = False
            for function in functions:
                found = self._handed_on(function)
                grows |= found != self._by_function[_key(function)]
                self._by_function[_key(function)] = found

    def of_calls(self, function: FunctionProto) -> AbstractSet[str]:
        """The names of those that a function takes."""
        return self._by_function[_key(function)]

    def of(self, node: NodeProto) -> AbstractSet[str]:
        """The names of those that a node may have."""
        return self._by_function.get((node.domain, node.op_type, node.overload), TYPE_ATTRIBUTES)

    def _handed_on(self, function: FunctionProto) -> AbstractSet[str]:
        attributes = ((attribute, self.of(node)) for node in nodes_below(function.node) for attribute in node.attribute)
        return {
            attribute.ref_attr_name for attribute, types in attributes if attribute.ref_attr_name and attribute.name in types
        }


def nodes_below(*roots: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes, and those of the graphs within them."""
    pending = [list(nodes) for nodes in roots]
    while pending:
        for node in pending.pop():
            yield node
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    pending.append(list(attribute.g.node))
                pending += [list(graph.node) for graph in attribute.graphs]


def _key(function: FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload
