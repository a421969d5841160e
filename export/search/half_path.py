"""Pieces of ONNX that say, inside a float32 graph, what float16 would make of a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.weight_ledger import FP16_MAX

PREFIX = "halfserve/search/"
# Stands for a difference that is NaN or infinite where the truth is finite; a power of two, so that float32 has it exactly.
BROKEN = 2.0**126


class Pieces:
    """Collects nodes and constants; every value that it makes has a name that no model has.

    Attributes:
        nodes: The nodes, in an order in which they can run.
        initializers: The constants.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._count = 0
        self._constants: dict[str, str] = {}
        self._penalties: dict[str, str] = {}

    def new_name(self) -> str:
        """A fresh name for a value."""
        self._count += 1
        return f"{PREFIX}{self._count}"

    def add(self, operation: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result; its name."""
        name = self.new_name()
        self.nodes.append(helper.make_node(operation, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: type[np.generic] = np.float32) -> str:
        """A constant, made once; its name."""
        array = np.asarray(value, dtype)
        key = f"{array.dtype}{array.tolist()}"
        if key not in self._constants:
            self._constants[key] = self.new_name()
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def rounded(self, x: str, *, saturate: bool = False) -> str:
        """X rounded to float16, as float32; beyond its range infinite, or the nearest number (as constants are converted)."""
        if saturate:
            x = self.add("Max", self.add("Min", x, self.constant(FP16_MAX)), self.constant(-FP16_MAX))
        return self.add("Cast", self.add("Cast", x, to=TensorProto.FLOAT16), to=TensorProto.FLOAT)

    def healed(self, x: str, other: str) -> str:
        """X, and the other where x is NaN or infinite, so that what breaks here does not hide what breaks behind it."""
        return self.add("Where", self._is_finite(x), x, other)

    def distance(self, truth: str, x: str) -> str:
        """Elementwise |x - truth|; `BROKEN` where only x is NaN or infinite, 0 where the truth is."""
        if truth not in self._penalties:
            finite = self._is_finite(truth)
            self._penalties[truth] = self.add("Where", finite, self.constant(BROKEN), self.constant(0.0))
        difference = self.add("Abs", self.add("Sub", truth, x))
        return self.add("Where", self.add("Less", difference, self.constant(BROKEN)), difference, self._penalties[truth])

    def magnitude(self, x: str) -> str:
        """Elementwise |x|, 0 where x is NaN or infinite."""
        return self.add("Where", self._is_finite(x), self.add("Abs", x), self.constant(0.0))

    def largest(self, x: str) -> str:
        """The largest of all elements, shape (1,); minus infinity where there are none."""
        return self.add("ReduceMax", self.add("Reshape", x, self.constant([-1], np.int64)), keepdims=1)

    def copy(
        self, node: onnx.NodeProto, inputs: Mapping[int, str], bodies: Callable[[onnx.GraphProto], None] | None = None
    ) -> list[str]:
        """Add a copy of a node that takes other values at some inputs; the names of its results, "" for absent ones.

        Args:
            node: The node.
            inputs: What to take, by input index.
            bodies: Changes each of the copy's graphs in place.
        """
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        for index, name in inputs.items():
            copied.input[index] = name
        for index, name in enumerate(node.output):
            copied.output[index] = self.new_name() if name else ""
        copied.name = f"{PREFIX}node_{self._count}"
        if bodies is not None:
            for body in graphs_of(copied):
                bodies(body)
        self.nodes.append(copied)
        return list(copied.output)

    def _is_finite(self, x: str) -> str:
        return self.add("Less", self.add("Abs", x), self.constant(BROKEN))


def graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node holds."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def captured(node: onnx.NodeProto) -> list[str]:
    """Names of the values that a node's graphs take from around them, in order of first use."""
    names: dict[str, None] = {}
    for graph in graphs_of(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            taken = [*inner.input, *captured(inner)]
            names.update(dict.fromkeys(name for name in taken if name and name not in own))
            own.update(inner.output)
        names.update(dict.fromkeys(value.name for value in graph.output if value.name not in own))
    return list(names)


def rename_captured(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Let a graph, and those within, take other values from around it. Captured outputs stay: they cannot be renamed."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for inner in graphs_of(node):
            rename_captured(inner, names)


def round_body(graph: onnx.GraphProto, floats: frozenset[str], pieces: Pieces) -> None:
    """Round the float32 result of every node of a graph, and of those within, to float16."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in graphs_of(node):
            round_body(inner, floats, pieces)
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in floats and node.op_type != "Constant":
                node.output[index] = pieces.new_name()
                half = pieces.new_name()
                nodes.append(helper.make_node("Cast", [node.output[index]], [half], to=TensorProto.FLOAT16))
                nodes.append(helper.make_node("Cast", [half], [name], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def gathered(pieces: Pieces, scalars: Sequence[str], output: str, chunk: int = 512) -> None:
    """Put many arrays of shape (1,) into one, under the given name."""
    parts = [pieces.add("Concat", *scalars[start : start + chunk], axis=0) for start in range(0, len(scalars), chunk)]
    pieces.nodes.append(helper.make_node("Concat", parts, [output], axis=0))
