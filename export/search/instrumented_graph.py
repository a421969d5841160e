"""One graph that measures how float16 changes every node: the float32 model, a float16 model beside it, and each single step.

Beside every node of the float32 graph (the truth) stand copies of it:

- one on the values of the *half path*, where every node rounds its result, as in the converted model. NaN and infinities
  there are healed: replaced by the value before rounding, or by the truth, so that an overflow does not hide other errors;
- for each float input, one that takes this input from the half path, unhealed, and the others from the truth: the part of the
  half path's error that the input brings in;
- one on rounded true inputs with a rounded result: the error of the node alone.

Each comparison yields one number, its largest difference. Memory is that of a few runs of the model, time that of about five.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from halfserve.export.half_types import HalfType
from halfserve.export.onnx_files.proto_graphs import bodies
from halfserve.export.onnx_fp16.graph import MOVERS, RANDOM
from halfserve.export.search.searched_model import SearchedModel

PREFIX = "halfserve/search/"
# Stands for a difference that is NaN or infinite where the truth is finite; a power of two, which float32 represents exactly.
BROKEN = 2.0**126
ProbeKind = Literal["scale", "rounding", "inherited", "local", "accumulated"]
RESULT = "halfserve/search/result"
# Integer or boolean results of these show an error: a choice that flipped.
_CHOICES = frozenset({"ArgMax", "ArgMin", "Cast", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "TopK"})
# A copy of these gives other numbers, or numbers of another shape.
_NOT_COPIED = RANDOM | {"NonMaxSuppression", "NonZero", "Unique"}
_NUMBERS = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})
_SOURCES = frozenset({"Constant", "ConstantOfShape"})


class GraphBuilder:
    """Collects nodes, in topological order, and constants, under names that no model uses."""

    def __init__(self, half: HalfType) -> None:
        self.half = half
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._count = 0
        self._constants: dict[str, str] = {}
        self._penalties: dict[str, str] = {}

    def new_name(self) -> str:
        self._count += 1
        return f"{PREFIX}{self._count}"

    def add(self, operation: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result and return the result's name."""
        name = self.new_name()
        self.nodes.append(helper.make_node(operation, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: type[np.generic] = np.float32) -> str:
        """Return the name of a constant; equal constants are made once."""
        array = np.asarray(value, dtype)
        key = f"{array.dtype}{array.tolist()}"
        if key not in self._constants:
            self._constants[key] = self.new_name()
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def rounded(self, x: str, *, saturate: bool = False) -> str:
        """Round x to the half type, as float32. Beyond its range: infinite, or with `saturate`, as for constants, clamped."""
        largest = self.half.largest
        if saturate:
            x = self.add("Max", self.add("Min", x, self.constant(largest)), self.constant(-largest))
        return self.add("Cast", self.add("Cast", x, to=self.half.elem_type), to=TensorProto.FLOAT)

    def healed(self, x: str, other: str) -> str:
        """Replace NaN and infinities of x by `other`, so that they do not hide errors behind them."""
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
        """Return the largest element, shape (1,); minus infinity of an empty value."""
        return self.add("ReduceMax", self.add("Reshape", x, self.constant([-1], np.int64)), keepdims=1)

    def copy(
        self, node: onnx.NodeProto, inputs: Mapping[int, str], change: Callable[[onnx.GraphProto], None] | None = None
    ) -> list[str]:
        """Add a copy of a node, some inputs replaced by index and each body changed in place; return its results, "" for absent
        ones.
        """
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        for index, name in inputs.items():
            copied.input[index] = name
        for index, name in enumerate(node.output):
            copied.output[index] = self.new_name() if name else ""
        copied.name = f"{PREFIX}node_{self._count}"
        if change is not None:
            for body in bodies(copied):
                change(body)
        self.nodes.append(copied)
        return list(copied.output)

    def _is_finite(self, x: str) -> str:
        return self.add("Less", self.add("Abs", x), self.constant(BROKEN))


def captured(node: onnx.NodeProto) -> list[str]:
    """Return names of outer values that a node's graphs use, in order of first use."""
    names: dict[str, None] = {}
    for graph in bodies(node):
        own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        for inner in graph.node:
            taken = [*inner.input, *captured(inner)]
            names.update(dict.fromkeys(name for name in taken if name and name not in own))
            own.update(inner.output)
        names.update(dict.fromkeys(value.name for value in graph.output if value.name not in own))
    return list(names)


def rename_captured(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename outer values in a graph and its inner graphs, except where they are outputs."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        for inner in bodies(node):
            rename_captured(inner, names)


def round_body(graph: onnx.GraphProto, floats: frozenset[str], builder: GraphBuilder) -> None:
    """Round the float32 result of every node of a graph and its inner graphs to the half type."""
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in bodies(node):
            round_body(inner, floats, builder)
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in floats and node.op_type != "Constant":
                node.output[index] = builder.new_name()
                half = builder.new_name()
                nodes.append(helper.make_node("Cast", [node.output[index]], [half], to=builder.half.elem_type))
                nodes.append(helper.make_node("Cast", [half], [name], to=TensorProto.FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def gathered(builder: GraphBuilder, scalars: Sequence[str], output: str, chunk: int = 512) -> None:
    """Concatenate arrays of shape (1,) into one output."""
    parts = [builder.add("Concat", *scalars[start : start + chunk], axis=0) for start in range(0, len(scalars), chunk)]
    builder.nodes.append(helper.make_node("Concat", parts, [output], axis=0))


@dataclass(frozen=True, kw_only=True)
class ErrorProbe:
    """Meaning of one number that the graph yields: its kind, an attribute of `RoundingErrors`, and the measured value.

    For "inherited", `source` is the name of the input; empty for all inputs together.
    """

    kind: ProbeKind
    value: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class InstrumentedGraph:
    """The graph, and the meanings of the numbers in its one output, `RESULT`."""

    model: onnx.ModelProto
    probes: tuple[ErrorProbe, ...]


def instrumented(searched: SearchedModel, kept: Collection[str]) -> InstrumentedGraph:
    """Build the graph; `kept` names nodes that stay float32 in any case."""
    model = onnx.ModelProto()
    model.CopyFrom(searched.prepared)
    writer = _Writer(searched, frozenset(kept))
    for node in searched.prepared.graph.node:
        writer.take(node)
    builder = writer.builder
    gathered(builder, writer.results or [builder.largest(builder.constant([0.0]))], RESULT)
    graph = model.graph
    del graph.node[:]
    del graph.output[:]
    del graph.value_info[:]
    graph.node.extend(builder.nodes)
    graph.initializer.extend(builder.initializers)
    graph.output.append(helper.make_tensor_value_info(RESULT, TensorProto.FLOAT, [None]))
    return InstrumentedGraph(model=model, probes=tuple(writer.probes))


class _Writer:
    def __init__(self, searched: SearchedModel, kept: frozenset[str]) -> None:
        graph = searched.prepared.graph
        self.builder = GraphBuilder(searched.settings.half)
        self.probes: list[ErrorProbe] = []
        self.results: list[str] = []
        self._floats, self._kept = searched.floats, kept
        self._half_nodes = searched.nodes.keys() - kept
        self._constants = {tensor.name for tensor in graph.initializer}
        self._types = {info.name: info.type.tensor_type.elem_type for info in [*graph.value_info, *graph.output]}
        # Each value of the half path, raw and healed. A value that is not in it is the unrounded truth.
        self._path: dict[str, tuple[str, str]] = {}
        self._is_rounded: set[str] = set()
        self._entering: dict[str, tuple[str, str]] = {}
        self._rounded_truth: dict[str, str] = {}

    def take(self, node: onnx.NodeProto) -> None:
        """Write a node, its copies and its comparisons."""
        self.builder.nodes.append(node)
        if node.op_type in _SOURCES:
            self._constants.update(node.output)
        inputs = {index: name for index, name in enumerate(node.input) if name in self._floats}
        inner = [name for name in captured(node) if name in self._floats]
        for name in node.output:
            if name in self._floats:
                self._probe("scale", name, self.builder.magnitude(name))
        if not (inputs or inner) or node.op_type in _NOT_COPIED:
            return
        half = node.name in self._half_nodes
        self._inherited(node, inputs, inner, half=half)
        self._local(node, inputs, half=half)
        self._half_copy(node, inputs, inner, half=half)

    def _probe(self, kind: ProbeKind, value: str, elements: str, source: str = "") -> None:
        self.probes.append(ErrorProbe(kind=kind, value=value, source=source))
        self.results.append(self.builder.largest(elements))

    def _edge(self, name: str, *, half: bool) -> tuple[str, str]:
        """Return a value of the half path, raw and healed, as a node consumes it."""
        path = self._path.get(name, (name, name))
        if not half or name in self._is_rounded:
            return path
        if name not in self._entering:
            raw = self.builder.rounded(path[1], saturate=name in self._constants)
            self._entering[name] = (raw, self.builder.healed(raw, path[1]))
        return self._entering[name]

    def _inherited(self, node: onnx.NodeProto, inputs: dict[int, str], inner: list[str], *, half: bool) -> None:
        if node.op_type in MOVERS and not node.domain:
            for name in dict.fromkeys(inputs.values()):
                error = self.builder.distance(name, self._edge(name, half=half)[0])
                for result in node.output:
                    self._probe("inherited", result, error, name)
            return
        if inner or any(True for _ in bodies(node)):
            raw = {name: self._edge(name, half=half)[0] for name in inner}
            taken = {index: self._edge(name, half=half)[0] for index, name in inputs.items()}
            self._differences("inherited", node, self.builder.copy(node, taken, lambda body: rename_captured(body, raw)))
            return
        for source in dict.fromkeys(inputs.values()):
            taken = {index: self._edge(name, half=half)[0] for index, name in inputs.items() if name == source}
            self._differences("inherited", node, self.builder.copy(node, taken), source)

    def _differences(self, kind: ProbeKind, node: onnx.NodeProto, results: list[str], source: str = "") -> None:
        for truth, result in zip(node.output, results, strict=True):
            if truth in self._floats:
                self._probe(kind, truth, self.builder.distance(truth, result), source)
            elif truth and node.op_type in _CHOICES and self._types.get(truth) in _NUMBERS:
                numbers = [self.builder.add("Cast", name, to=TensorProto.FLOAT) for name in (truth, result)]
                self._probe(kind, truth, self.builder.distance(*numbers), source)

    def _local(self, node: onnx.NodeProto, inputs: dict[int, str], *, half: bool) -> None:
        results = list(node.output)
        if half and any(True for _ in bodies(node)):
            results = self.builder.copy(node, {}, lambda body: round_body(body, self._floats, self.builder))
        self._rounding("rounding", node, results)
        if half:
            self._rounding(
                "local", node, self.builder.copy(node, {index: self._truth_rounded(name) for index, name in inputs.items()})
            )

    def _rounding(self, kind: ProbeKind, node: onnx.NodeProto, results: Sequence[str]) -> None:
        for truth, result in zip(node.output, results, strict=True):
            if truth in self._floats:
                self._probe(kind, truth, self.builder.distance(truth, self.builder.rounded(result)))

    def _truth_rounded(self, name: str) -> str:
        if name not in self._rounded_truth:
            self._rounded_truth[name] = self.builder.rounded(name, saturate=name in self._constants)
        return self._rounded_truth[name]

    def _half_copy(self, node: onnx.NodeProto, inputs: dict[int, str], inner: list[str], *, half: bool) -> None:
        if not any(name in self._floats for name in node.output):
            return
        names = {name: self._edge(name, half=half)[1] for name in inner}

        def change(body: onnx.GraphProto) -> None:
            rename_captured(body, names)
            if half:
                round_body(body, self._floats, self.builder)

        healed = {index: self._edge(name, half=half)[1] for index, name in inputs.items()}
        for truth, result in zip(node.output, self.builder.copy(node, healed, change), strict=True):
            if truth not in self._floats:
                continue
            healed_result = self.builder.healed(result, truth)
            self._path[truth] = (result, healed_result)
            if half:
                raw = self.builder.rounded(result)
                self._path[truth] = (raw, self.builder.healed(raw, healed_result))
                self._is_rounded.add(truth)
            self._probe("accumulated", truth, self.builder.distance(truth, self._path[truth][1]))
