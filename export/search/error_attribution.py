"""Attribute the errors at a model's outputs to single roundings, and rank the nodes by them.

Errors flow forward; blame flows back from the outputs that are over budget. A value's error has several parts: what each
input brings in, and the rounding of the value itself. Blame that arrives at a value is divided among these in proportion. The
rounding's part stays at the edge along which it arrived, and the rest moves on to the inputs. NaN and infinities are replaced
in the half path and have no part in its errors, so blame for them flows separately, from every node that turns a finite value
into one.

An edge is a value and a node that consumes it. Its rounding disappears only when the nodes at both ends stay float32, so
edges are ranked and not nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import version_converter

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import serialize
from halfserve.export.search.instrumented_graph import BROKEN, RESULT, ErrorProbe, captured, instrumented
from halfserve.export.search.searched_model import SearchedModel
from halfserve.export.verification.samples import Array, Feed
from halfserve.export.verification.worker import cast_for_input

# Weight of NaN and infinities, so that no sum of finite errors outranks one.
_BREAKING = 1e6
_NEGLIGIBLE = 1e-9
_LARGE = 0.02
_MUCH = 0.005  # relative error; ten roundings


@dataclass(frozen=True, kw_only=True)
class RoundingErrors:
    """Largest errors over all samples, by value name; `BROKEN` or more stands for NaN or infinite.

    Attributes:
        scale: Largest finite magnitude of a value that a node makes.
        rounding: Error of rounding the value.
        inherited: Error that each input of the node brings into the value, by the input's name; "" for all inputs together.
        local: Error of the node on rounded true inputs with its result rounded.
        accumulated: Error of the healed half path.
        half: Nodes that were float16 in the half path.
    """

    scale: dict[str, float] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    inherited: dict[str, dict[str, float]] = field(default_factory=dict)
    local: dict[str, float] = field(default_factory=dict)
    accumulated: dict[str, float] = field(default_factory=dict)
    half: frozenset[str] = frozenset()

    def relative_error(self, value: str) -> float:
        """Approximate error of the half path at a value, divided by its scale: errors of its inputs plus its rounding."""
        return self._relative(value, sum(self.inherited.get(value, {}).values()) + self.rounding.get(value, 0.0))

    def relative_accumulated(self, value: str) -> float:
        """Error of the healed half path at a value, divided by its scale; 0 where it was not measured."""
        return self._relative(value, self.accumulated.get(value, 0.0))

    def relative_inherited(self, value: str, source: str) -> float:
        """Error that an input brings into a value, divided by the value's scale; infinite on overflow."""
        error = self.inherited.get(value, {}).get(source, 0.0)
        return math.inf if error >= BROKEN else self._relative(value, error)

    def local_error(self, values: Collection[str]) -> float | None:
        """Largest error of a node alone, divided by its results' scales; infinite on overflow, None if not measured."""
        errors = {value: self.local[value] for value in values if value in self.local}
        return max((math.inf if e >= BROKEN else self._relative(value, e) for value, e in errors.items()), default=None)

    def _relative(self, value: str, error: float) -> float:
        scale = self.scale.get(value, 0.0)
        return error / scale if scale else error


def measure(searched: SearchedModel, kept: Collection[str], batches: Sequence[Feed]) -> RoundingErrors:
    """Run the instrumented graph in this process; it is float32 and not optimised, and its reference ran before.

    `kept` names the nodes that stay float32 in any case.

    Raises:
        ExportError: The graph cannot be built or run, as with an operator whose result has another size each time.
    """
    graph = instrumented(replace(searched, prepared=with_where(searched.prepared)), kept)
    try:
        session = onnxruntime.InferenceSession(serialize(graph.model), _options(), providers=["CPUExecutionProvider"])
        types = {value.name: value.type for value in session.get_inputs()}
        feeds = ({name: cast_for_input(array, types[name]) for name, array in batch.items()} for batch in batches)
        rows: list[Any] = [session.run([RESULT], feed)[0] for feed in feeds]
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(str(error).splitlines()[0]) from error
    half = frozenset(searched.nodes).difference(kept)
    return replace(_sorted(graph.probes, np.maximum(np.stack(rows).max(axis=0), 0)), half=half)


def with_where(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, or its conversion to opset 13 where its opset is older than 9, which lacks Where.

    Raises:
        ExportError: ONNX cannot convert it.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset >= 9:
        return model
    try:
        return version_converter.convert_version(model, 13)
    except Exception as error:
        raise ExportError(f"opset {opset} is too old to be measured: {str(error).splitlines()[0]}") from error


def _options() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Optimisation would merge the casts and copies whose differences are measured.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # The planner for memory reuse takes minutes for ten thousand nodes; without it, memory is still freed.
    options.enable_mem_reuse = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _sorted(probes: Sequence[ErrorProbe], numbers: Array) -> RoundingErrors:
    measured = RoundingErrors(inherited=defaultdict(dict))
    for probe, number in zip(probes, numbers.tolist(), strict=True):
        if probe.kind == "inherited":
            measured.inherited[probe.value][probe.source] = number
        else:
            getattr(measured, probe.kind)[probe.value] = number
    return measured


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The rounding of a value on its way into a node.

    Attributes:
        value: Name of the value.
        producer: The node that makes it; empty for inputs and weights.
        consumer: The node that consumes it; empty at a model output.
        blame: Share of the outputs' errors. Finite errors add up to about 1, NaN and infinities to `_BREAKING` times that.
    """

    value: str
    producer: str
    consumer: str
    blame: float

    @property
    def is_heavy(self) -> bool:
        return _LARGE <= self.blame <= 1 or self.blame >= _LARGE * _BREAKING


def blamed_edges(
    searched: SearchedModel, measured: RoundingErrors, outputs: Mapping[str, float], *, breaking: bool
) -> list[Edge]:
    """Edges with blame, most blamed first, ties in the graph's order.

    `outputs` weighs each output's error, by name; `breaking` says whether NaN or infinite values reach the outputs.
    """
    producers = {name: node for node in searched.prepared.graph.node for name in node.output if name}
    flows = [_Flow(searched, measured, producers, breaking=False)]
    total = sum(outputs.values()) or 1.0
    for name, weight in outputs.items():
        flows[0].arrive(name, "", weight / total)
    if breaking:
        flows.append(_Flow(searched, measured, producers, breaking=True))
    blame: dict[tuple[str, str], float] = defaultdict(float)
    for flow in flows:
        for edge, part in flow.run().items():
            blame[edge] += part
    order = {node.name: index for index, node in enumerate(searched.prepared.graph.node)}
    edges = [
        Edge(value=value, producer=producers[value].name if value in producers else "", consumer=consumer, blame=part)
        for (value, consumer), part in blame.items()
        if part > _NEGLIGIBLE
    ]
    return sorted(edges, key=lambda e: (-e.blame, order.get(e.consumer, len(order)), e.value))


class _Flow:
    """Propagation of one kind of blame, finite or breaking, back through a model."""

    def __init__(
        self, searched: SearchedModel, measured: RoundingErrors, producers: Mapping[str, onnx.NodeProto], *, breaking: bool
    ) -> None:
        self._graph, self._floats = searched.prepared.graph, searched.floats
        self._measured, self._producers, self._breaking = measured, producers, breaking
        self._arrived: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._stayed: dict[tuple[str, str], float] = defaultdict(float)

    def arrive(self, value: str, consumer: str, blame: float) -> None:
        self._arrived[value][consumer] += blame

    def run(self) -> dict[tuple[str, str], float]:
        """Return the blame of each edge (value, consumer)."""
        for node in reversed(self._graph.node):
            for value in node.output:
                if value:
                    self._share_out(node, value)
        for value in [*(info.name for info in self._graph.input), *(tensor.name for tensor in self._graph.initializer)]:
            for consumer, blame in self._arrived.get(value, {}).items():
                self._stay(value, consumer, blame)
        return self._stayed

    def _stay(self, value: str, consumer: str, blame: float) -> None:
        if blame:
            self._stayed[value, consumer] += blame

    def _share_out(self, node: onnx.NodeProto, value: str) -> None:
        rounding, inherited = self._measured.rounding.get(value, 0.0), self._inherited(node, value)
        if self._breaking and any(error >= BROKEN for error in inherited.values()):
            self.arrive(value, "", _BREAKING)
        elif not self._breaking:
            rounding = 0.0 if rounding >= BROKEN else rounding
            inherited = {source: self._unbroken(source, error, value) for source, error in inherited.items()}
        from_inputs = sum(inherited.values())
        for consumer, blame in self._arrived.get(value, {}).items():
            own = rounding if {node.name, consumer} & self._measured.half else 0.0
            whole = own + from_inputs
            if not whole:
                self._pass_on(node, value, consumer, blame)
                continue
            self._stay(value, consumer, blame * own / whole)
            for source, error in inherited.items():
                if error:
                    self.arrive(source, node.name, blame * error / whole)

    def _inherited(self, node: onnx.NodeProto, value: str) -> dict[str, float]:
        """Error that each input brings into a value; a node with bodies divides its total by the inputs' relative errors."""
        inherited = dict(self._measured.inherited.get(value, {}))
        together = inherited.pop("", 0.0)
        if together:
            sources = [name for name in dict.fromkeys([*node.input, *captured(node)]) if name in self._floats]
            errors = {name: self._measured.relative_error(name) for name in sources}
            total = sum(errors.values())
            inherited.update({name: together * error / total for name, error in errors.items() if total and error})
        return inherited

    def _pass_on(self, node: onnx.NodeProto, value: str, consumer: str, blame: float) -> None:
        """Divide blame equally among the inputs where nothing was measured, as between integers."""
        sources = [name for name in dict.fromkeys(node.input) if name in self._producers]
        if value in self._floats and self._floats.isdisjoint(sources):
            self._stay(value, consumer, blame)
            return
        for source in sources:
            self.arrive(source, node.name, blame / len(sources))

    def _unbroken(self, source: str, error: float, value: str) -> float:
        """Error that an input brings in after healing: where it breaks the value, its own carried error approximates it."""
        if error < BROKEN:
            return error
        return self._measured.relative_accumulated(source) * self._measured.scale.get(value, 0.0)


class Reasons:
    """Describe what half precision does to nodes of one model, from its rounding errors and finite blame."""

    def __init__(
        self, searched: SearchedModel, measured: RoundingErrors, edges: Sequence[Edge], constants: dict[str, float]
    ) -> None:
        self._half = searched.settings.half
        self._nodes = {node.name: node for node in searched.prepared.graph.node}
        self._consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in searched.prepared.graph.node:
            for value in dict.fromkeys(node.input):
                self._consumers[value].append(node)
        self._measured, self._edges, self._constants = measured, edges, constants

    def of(self, name: str) -> str:
        """Return the strongest reason to keep a node in float32."""
        return next(self._all(self._nodes[name]), "the budget breaks without it")

    def _all(self, node: onnx.NodeProto) -> Iterator[str]:
        for value in node.output:
            if self._measured.scale.get(value, 0.0) > self._half.largest:
                yield f"its output overflows: {self._measured.scale[value]:.2g}"
        for value in node.input:
            if self._measured.scale.get(value, 0.0) > self._half.largest:
                yield f"its input {value!r} overflows: {self._measured.scale[value]:.2g}"
        for value in node.input:
            if 0 < abs(self._constants.get(value, 1.0)) <= self._half.largest_flushed:
                yield f"its constant {self._constants[value]:.2g} becomes 0"
        yield from self._breaks(node)
        yield from self._errs(node)
        share = sum(edge.blame for edge in self._edges if node.name in (edge.producer, edge.consumer))
        if share >= 0.005:
            yield f"roundings beside it make {min(share, 1.0):.0%} of the outputs' error"

    def _breaks(self, node: onnx.NodeProto) -> Iterator[str]:
        for value in node.output:
            for source, error in self._measured.inherited.get(value, {}).items():
                if error >= BROKEN:
                    yield f"gives NaN or infinity when {source!r} is rounded" if source else "gives NaN or infinity"
        for consumer, value, error in self._onward(node):
            if error == math.inf:
                yield f"{consumer!r} gives NaN or infinity when {value!r}, made here, is rounded"

    def _errs(self, node: onnx.NodeProto) -> Iterator[str]:
        local = self._measured.local_error(list(node.output))
        if local is not None and local > _MUCH:
            yield f"rounding what it takes and gives changes its result by {local:.1%}"
        worst = max(self._onward(node), key=lambda found: found[2], default=None)
        if worst is not None and worst[2] > _MUCH:
            yield f"{worst[0]!r} changes by {worst[2]:.1%} when {worst[1]!r}, made here, is rounded"

    def _onward(self, node: onnx.NodeProto) -> Iterator[tuple[str, str, float]]:
        """Errors that a node's results bring into their consumers: (node, value, relative error)."""
        for value in node.output:
            for consumer in self._consumers.get(value, ()):
                for result in consumer.output:
                    yield consumer.name, value, self._measured.relative_inherited(result, value)


def scalar_constants(model: onnx.ModelProto) -> dict[str, float]:
    """Return initializers and Constant nodes with one float element, by name."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    found = {}
    for name, tensor in tensors.items():
        if tensor.data_type == onnx.TensorProto.FLOAT and all(size == 1 for size in tensor.dims):
            found[name] = float(onnx.numpy_helper.to_array(tensor).ravel()[0])
    return found


def ranked_steps(
    searched: SearchedModel,
    candidates: Collection[str],
    edges: Sequence[Edge],
    measured: RoundingErrors,
    first: Sequence[Collection[str]] = (),
) -> list[tuple[str, ...]]:
    """Return groups of nodes in the order in which to add them; every candidate is in exactly one.

    The groups of `first` come before all others, then the nodes at both ends of each edge, most blamed first, then nodes
    without blame by their own errors.
    """
    left = dict.fromkeys(name for name in searched.nodes if name in set(candidates))
    steps: list[tuple[str, ...]] = []
    for group in (*first, *((edge.producer, edge.consumer) for edge in edges)):
        step = tuple(name for name in dict.fromkeys(group) if name in left)
        for name in step:
            del left[name]
        if step:
            steps.append(step)
    outputs = {node.name: list(node.output) for node in searched.prepared.graph.node}
    rest = sorted(left, key=lambda name: -(measured.local_error(outputs[name]) or 0.0))
    return [*steps, *((name,) for name in rest)]
