"""One graph that says how float16 hurts every node: the float32 model, a float16 model beside it, and each step in between.

Beside every node of the float32 graph (the truth) stand copies of it:

- one on the values of the *half path*, where every node rounds its result, as in the converted model. What is NaN or infinite
  there is replaced by what it was before rounding, or by the truth, so that an overflow does not hide other errors;
- for each float input, one that takes that input from the half path, unhealed, and the truth elsewhere: how much of the half
  path's error this one input brings in;
- one whose inputs are the truth, rounded, and whose result is rounded: the error that is the node's own.

Only the largest difference of each comparison leaves the graph, one number; memory is that of a few runs of the model, and the
time that of about five.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import onnx
from onnx import TensorProto, helper

from export.onnx_fp16.planning.op_sets import MOVERS
from export.search.half_path import Pieces, captured, gathered, graphs_of, rename_captured, round_body
from export.search.searched_model import SearchedModel

Kind = Literal["scale", "fresh", "brought", "local", "carried"]
RESULT = "halfserve/search/result"
# Their integer or boolean results show an error: a choice that flipped.
_CHOICES = frozenset({"ArgMax", "ArgMin", "Cast", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "TopK"})
# A copy of them would give other numbers, or numbers of another shape.
_NOT_COPIED = frozenset(
    {
        "Bernoulli",
        "Multinomial",
        "NonMaxSuppression",
        "NonZero",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Unique",
    }
)
_NUMBERS = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})
_SOURCES = frozenset({"Constant", "ConstantOfShape"})


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One number that the graph gives.

    Attributes:
        kind: "scale": the value's largest magnitude. "fresh": largest error of rounding the value. "brought": largest error
            that `source` brings into it. "local": largest error of its node alone. "carried": the healed half path's error.
        value: The value that it is about.
        source: The input's value, for "brought"; empty for all inputs together.
    """

    kind: Kind
    value: str
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class InstrumentedGraph:
    """The graph, and what the numbers in its one output, `RESULT`, are."""

    model: onnx.ModelProto
    probes: tuple[Probe, ...]


def instrumented(searched: SearchedModel, kept: Collection[str]) -> InstrumentedGraph:
    """Build the graph.

    Args:
        searched: The model.
        kept: Nodes that stay float32 whatever is searched for.
    """
    model = onnx.ModelProto()
    model.CopyFrom(searched.prepared)
    writer = _Writer(searched, frozenset(kept))
    for node in searched.prepared.graph.node:
        writer.take(node)
    pieces = writer.pieces
    gathered(pieces, writer.results or [pieces.largest(pieces.constant([0.0]))], RESULT)
    graph = model.graph
    del graph.node[:]
    del graph.output[:]
    del graph.value_info[:]
    graph.node.extend(pieces.nodes)
    graph.initializer.extend(pieces.initializers)
    graph.output.append(helper.make_tensor_value_info(RESULT, TensorProto.FLOAT, [None]))
    return InstrumentedGraph(model=model, probes=tuple(writer.probes))


class _Writer:
    """Writes the graph node by node."""

    def __init__(self, searched: SearchedModel, kept: frozenset[str]) -> None:
        graph = searched.prepared.graph
        self.pieces = Pieces()
        self.probes: list[Probe] = []
        self.results: list[str] = []
        self._floats, self._kept = searched.floats, kept
        self._half_nodes = searched.nodes.keys() - kept
        self._constants = {tensor.name for tensor in graph.initializer}
        self._types = {info.name: info.type.tensor_type.elem_type for info in [*graph.value_info, *graph.output]}
        # Of each value of the half path: as it is, and healed. Those not in it are as in the truth, and unrounded.
        self._path: dict[str, tuple[str, str]] = {}
        self._is_rounded: set[str] = set()
        self._entering: dict[str, tuple[str, str]] = {}
        self._rounded_truth: dict[str, str] = {}

    def take(self, node: onnx.NodeProto) -> None:
        """Write a node and all that belongs to it."""
        self.pieces.nodes.append(node)
        if node.op_type in _SOURCES:
            self._constants.update(node.output)
        inputs = {index: name for index, name in enumerate(node.input) if name in self._floats}
        inner = [name for name in captured(node) if name in self._floats]
        for name in node.output:
            if name in self._floats:
                self._probe("scale", name, self.pieces.magnitude(name))
        if not (inputs or inner) or node.op_type in _NOT_COPIED:
            return
        half = node.name in self._half_nodes
        self._brought(node, inputs, inner, half=half)
        self._local(node, inputs, half=half)
        self._half_copy(node, inputs, inner, half=half)

    def _probe(self, kind: Kind, value: str, elements: str, source: str = "") -> None:
        self.probes.append(Probe(kind=kind, value=value, source=source))
        self.results.append(self.pieces.largest(elements))

    def _edge(self, name: str, *, half: bool) -> tuple[str, str]:
        """A value of the half path as a node takes it: as it is, and healed."""
        path = self._path.get(name, (name, name))
        if not half or name in self._is_rounded:
            return path
        if name not in self._entering:
            raw = self.pieces.rounded(path[1], saturate=name in self._constants)
            self._entering[name] = (raw, self.pieces.healed(raw, path[1]))
        return self._entering[name]

    def _brought(self, node: onnx.NodeProto, inputs: dict[int, str], inner: list[str], *, half: bool) -> None:
        if node.op_type in MOVERS and not node.domain:
            for name in dict.fromkeys(inputs.values()):
                error = self.pieces.distance(name, self._edge(name, half=half)[0])
                for result in node.output:
                    self._probe("brought", result, error, name)
            return
        if inner or any(True for _ in graphs_of(node)):
            raw = {name: self._edge(name, half=half)[0] for name in inner}
            taken = {index: self._edge(name, half=half)[0] for index, name in inputs.items()}
            self._differences("brought", node, self.pieces.copy(node, taken, lambda body: rename_captured(body, raw)))
            return
        for source in dict.fromkeys(inputs.values()):
            taken = {index: self._edge(name, half=half)[0] for index, name in inputs.items() if name == source}
            self._differences("brought", node, self.pieces.copy(node, taken), source)

    def _differences(self, kind: Kind, node: onnx.NodeProto, results: list[str], source: str = "") -> None:
        for truth, result in zip(node.output, results, strict=True):
            if truth in self._floats:
                self._probe(kind, truth, self.pieces.distance(truth, result), source)
            elif truth and node.op_type in _CHOICES and self._types.get(truth) in _NUMBERS:
                numbers = [self.pieces.add("Cast", name, to=TensorProto.FLOAT) for name in (truth, result)]
                self._probe(kind, truth, self.pieces.distance(*numbers), source)

    def _local(self, node: onnx.NodeProto, inputs: dict[int, str], *, half: bool) -> None:
        results = [name if name in self._floats else "" for name in node.output]
        if half and any(True for _ in graphs_of(node)):
            inside = self.pieces.copy(node, {}, lambda body: round_body(body, self._floats, self.pieces))
            results = [inside[index] if name else "" for index, name in enumerate(results)]
        for truth, result in zip(node.output, results, strict=True):
            if result:
                self._probe("fresh", truth, self.pieces.distance(truth, self.pieces.rounded(result)))
        if not half:
            return
        alone = self.pieces.copy(node, {index: self._truth_rounded(name) for index, name in inputs.items()})
        rounded = [
            self.pieces.rounded(name) if truth in self._floats else "" for truth, name in zip(node.output, alone, strict=True)
        ]
        for truth, result in zip(node.output, rounded, strict=True):
            if result:
                self._probe("local", truth, self.pieces.distance(truth, result))

    def _truth_rounded(self, name: str) -> str:
        if name not in self._rounded_truth:
            self._rounded_truth[name] = self.pieces.rounded(name, saturate=name in self._constants)
        return self._rounded_truth[name]

    def _half_copy(self, node: onnx.NodeProto, inputs: dict[int, str], inner: list[str], *, half: bool) -> None:
        if not any(name in self._floats for name in node.output):
            return
        names = {name: self._edge(name, half=half)[1] for name in inner}

        def change(body: onnx.GraphProto) -> None:
            rename_captured(body, names)
            if half:
                round_body(body, self._floats, self.pieces)

        healed = {index: self._edge(name, half=half)[1] for index, name in inputs.items()}
        for truth, result in zip(node.output, self.pieces.copy(node, healed, change), strict=True):
            if truth not in self._floats:
                continue
            healed_result = self.pieces.healed(result, truth)
            self._path[truth] = (result, healed_result)
            if half:
                raw = self.pieces.rounded(result)
                self._path[truth] = (raw, self.pieces.healed(raw, healed_result))
                self._is_rounded.add(truth)
            self._probe("carried", truth, self.pieces.distance(truth, self._path[truth][1]))
