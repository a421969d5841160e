"""Operators of many operands, as ONNX Runtime's CUDA kernels take them: two by two, each result rounded to float16.

Sum (core/providers/cuda/math/variadic_elementwise_ops.cc) adds one input after the other in the tensor's own type: 6e4 + 6e4 -
6e4 is infinite there. Einsum (core/providers/cpu/math/einsum_utils, for both providers) sums over what only one operand has
before it multiplies, and multiplies pair after pair; what comes between are tensors of float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import helper


def two_by_two(node: onnx.NodeProto, numbers: Iterator[int]) -> list[onnx.NodeProto]:
    """The node, or for one that rounds between its operands, the nodes it consists of; the last has its name.

    Args:
        node: Any node that computes in float16.
        numbers: Gives each such node a number of its own, for the names of its inner values.
    """
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Einsum", "Sum"):
        return [node]
    parts = _Parts(node, f"{node.output[0]}/two_by_two_{next(numbers)}")
    if node.op_type == "Sum":
        return _additions(node, parts) if len(node.input) > 2 else [node]
    equation = next(attribute.s.decode() for attribute in node.attribute if attribute.name == "equation").replace(" ", "")
    return [node] if "." in equation else _products(node, equation, parts)


class _Parts:
    """Makes the operations of one node; the last gets the node's result."""

    def __init__(self, node: onnx.NodeProto, prefix: str) -> None:
        self._node = node
        self._prefix = prefix
        self.made: list[onnx.NodeProto] = []

    def add(self, operation: str, inputs: Sequence[str], **attributes: str) -> str:
        name = f"{self._prefix}/{len(self.made)}"
        made = helper.make_node(operation, inputs, [name], name=name, **attributes)
        made.metadata_props.extend(self._node.metadata_props)
        self.made.append(made)
        return str(made.output[0])

    def finished(self) -> list[onnx.NodeProto]:
        self.made[-1].output[0], self.made[-1].name = self._node.output[0], self._node.name
        return self.made


def _additions(node: onnx.NodeProto, parts: _Parts) -> list[onnx.NodeProto]:
    total = node.input[0]
    for addend in node.input[1:]:
        total = parts.add("Add", [total, addend])
    return parts.finished()


def _products(node: onnx.NodeProto, equation: str, parts: _Parts) -> list[onnx.NodeProto]:
    """Each operand without what is summed over in it alone, then product after product; labels go when nobody has them."""
    left, _, right = equation.partition("->")
    terms = left.split(",")
    result = right if "->" in equation else "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    operands: list[tuple[str, str]] = []
    for index, (name, term) in enumerate(zip(node.input, terms, strict=True)):
        kept = _kept(term, [*terms[:index], *terms[index + 1 :], result]) if len(terms) > 1 else term
        operands.append(
            (name, term) if set(kept) == set(term) else (parts.add("Einsum", [name], equation=f"{term}->{kept}"), kept)
        )
    (product, labels), *rest = operands
    for index, (name, term) in enumerate(rest, 1):
        last = index == len(rest)
        kept = result if last else _kept(labels + term, [*(term for _, term in rest[index:]), result])
        product, labels = parts.add("Einsum", [product, name], equation=f"{labels},{term}->{kept}"), kept
    return parts.finished() if len(parts.made) > 1 else [node]


def _kept(labels: str, others: Sequence[str]) -> str:
    """The labels that others have too, each once."""
    return "".join(label for label in dict.fromkeys(labels) if any(label in other for other in others))
