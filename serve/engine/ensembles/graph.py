"""The graph of an ensemble: its steps, the tensors between them, and their dependencies. A pure data structure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from halfserve.protos.datatypes import BY_CONFIG
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ENSEMBLE
from halfserve.serve.engine.config.model_config import require_reshape
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

# Settings of models that compute, which an ensemble may not have, as in Triton.
NOT_FOR_ENSEMBLES = ("instance_group", "optimization", "model_warmup")
N = TypeVar("N")


@dataclass(frozen=True, kw_only=True)
class EnsembleStep:
    """One step of an ensemble.

    Attributes:
        number: position in the configuration, from 1.
        model: name of the model that computes the step.
        version: version of the model; None for the latest.
        inputs: the tensor that each input of the model gets, by the input's name.
        outputs: the tensor that each output of the model becomes, by the output's name; outputs that are left out are dropped.
    """

    number: int
    model: str
    version: int | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @property
    def label(self) -> str:
        """Name of the step in error texts."""
        return f"step {self.number} (model {self.model!r})"


@dataclass(frozen=True, kw_only=True)
class EnsembleGraph:
    """A graph that can be computed: every tensor is written once, before the steps that read it.

    Attributes:
        name: name of the ensemble.
        inputs: inputs of the ensemble, in the shapes that the steps see.
        outputs: outputs of the ensemble, in the shapes that the steps see.
        steps: steps in the order of the configuration.
        writers: the index in `steps` of the step that writes a tensor, by the tensor's name; inputs have none.
        max_in_flight: most requests in flight to each step's model, over all requests of the ensemble; 0 for no limit.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    steps: tuple[EnsembleStep, ...]
    writers: Mapping[str, int]
    max_in_flight: int = 0

    def needed(self, outputs: Iterable[str]) -> frozenset[int]:
        """Return the indices of the steps that have to be computed for these outputs of the ensemble."""
        found = set[int]()
        open_steps = [self.writers[name] for name in outputs]
        while open_steps:
            index = open_steps.pop()
            if index not in found:
                found.add(index)
                open_steps += self.waits_for(index)
        return frozenset(found)

    def waits_for(self, index: int) -> frozenset[int]:
        """Return the indices of the steps whose outputs a step reads."""
        return frozenset(self.writers[tensor] for tensor in self.steps[index].inputs.values() if tensor in self.writers)


def is_ensemble(config: ModelConfig) -> bool:
    """Return whether a configuration is an ensemble's."""
    return config.platform == ENSEMBLE.platform or (
        config.HasField("ensemble_scheduling") and not config.platform and not config.backend
    )


def step_models(config: ModelConfig) -> list[str]:
    """Return the models of an ensemble's steps, each once; none for another model's configuration."""
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step)) if is_ensemble(config) else []


def ensemble_specs(config: ModelConfig, source: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs that an ensemble's configuration declares, as its clients see them.

    Raises:
        ModelLoadError: a tensor has no name, type or valid shape, or there is none.
    """
    batch = (ANY_SIZE,) if config.max_batch_size else ()

    def specs(kind: str, entries: Any) -> tuple[TensorSpec, ...]:
        if not entries:
            raise ModelLoadError(f"{source}: the ensemble has no {kind}, expected one at least; declare it")
        twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
        if twice:
            raise ModelLoadError(f"{source}: {kind} {twice[0]!r} is there twice, expected each once; remove one")
        return tuple(_spec(entry, batch, f"{source}: {kind} {entry.name!r}") for entry in entries)

    return specs("input", config.input), specs("output", config.output)


def _spec(entry: Any, batch: tuple[int, ...], where: str) -> TensorSpec:
    datatype = BY_CONFIG.get(entry.data_type)
    if not entry.name or datatype is None:
        raise ModelLoadError(f"{where} has no {'data_type' if entry.name else 'name'}; an ensemble declares its tensors")
    own = (*batch, *entry.reshape.shape) if entry.HasField("reshape") else None
    if min([*entry.dims, *(own or ())], default=0) < ANY_SIZE:
        raise ModelLoadError(f"{where} has dims {list(entry.dims)}, expected sizes of 0 or more, or {ANY_SIZE} for any size")
    if own is not None:
        require_reshape(entry, where)
    return TensorSpec(
        name=entry.name,
        datatype=datatype,
        shape=(*batch, *entry.dims),
        model_shape=own,
        optional=getattr(entry, "optional", False),  # outputs have no such field
    )


def read_graph(config: ModelConfig, source: Path) -> EnsembleGraph:
    """Read the graph of an ensemble from the configuration in `source`. The models of its steps are not examined.

    Raises:
        ModelLoadError: the configuration is not a graph that can be computed; the message names step and tensor.
    """
    for field in NOT_FOR_ENSEMBLES:
        if field in {present.name for present, _ in config.ListFields()}:
            raise ModelLoadError(f"{source}: {field} is not for ensembles; set it for the models of the steps instead")
    if config.max_batch_size < 0:
        raise ModelLoadError(f"{source}: max_batch_size is {config.max_batch_size}, expected 0 (no batching) or more")
    inputs, outputs = ensemble_specs(config, source)
    steps = tuple(_step(entry, number, source) for number, entry in enumerate(config.ensemble_scheduling.step, 1))
    if not steps:
        raise ModelLoadError(f"{source}: ensemble_scheduling has no step, expected one at least")
    names = {spec.name for spec in inputs}
    graph = EnsembleGraph(
        name=config.name,
        inputs=tuple(_inside(spec) for spec in inputs),
        outputs=tuple(_inside(spec) for spec in outputs),
        steps=steps,
        writers=_writers(steps, names, source),
        max_in_flight=config.ensemble_scheduling.max_inflight_requests,
    )
    _require_written(graph, names, source)
    _require_read(graph, names, source)
    _, cycle = dependency_order(range(len(steps)), graph.waits_for)
    if cycle:
        loop = " -> ".join(steps[index].label for index in reversed(cycle))
        raise ModelLoadError(f"{source}: the steps wait for each other: {loop}; remove one of the tensors between them")
    return graph


def _inside(spec: TensorSpec) -> TensorSpec:
    """Return a tensor of the ensemble in the shape that its steps see."""
    shape = spec.shape if spec.model_shape is None else spec.model_shape
    return TensorSpec(name=spec.name, datatype=spec.datatype, shape=shape, optional=spec.optional)


def _step(entry: Any, number: int, source: Path) -> EnsembleStep:
    where = f"{source}: ensemble_scheduling: step {number}"
    missing = next((field for field in ("model_name", "input_map", "output_map") if not getattr(entry, field)), None)
    if missing is not None:
        raise ModelLoadError(f"{where} has no {missing}; expected one")
    if entry.model_namespace:
        raise ModelLoadError(f"{where} has a model_namespace, which is not supported; one repository is served here")
    return EnsembleStep(
        number=number,
        model=entry.model_name,
        version=entry.model_version if entry.model_version > 0 else None,
        inputs=dict(entry.input_map),
        outputs=dict(entry.output_map),
    )


def _writers(steps: tuple[EnsembleStep, ...], inputs: set[str], source: Path) -> dict[str, int]:
    writers: dict[str, int] = {}
    for index, step in enumerate(steps):
        for output, tensor in sorted(step.outputs.items()):
            if tensor in inputs or tensor in writers:
                by = "is an input of the ensemble" if tensor in inputs else f"is written by {steps[writers[tensor]].label}"
                raise ModelLoadError(
                    f"{source}: {step.label}: output {output!r} writes the tensor {tensor!r}, which {by}; give it another name"
                )
            writers[tensor] = index
    return writers


def _require_written(graph: EnsembleGraph, inputs: set[str], source: Path) -> None:
    for step in graph.steps:
        for name, tensor in sorted(step.inputs.items()):
            if tensor not in graph.writers and tensor not in inputs:
                raise ModelLoadError(
                    f"{source}: {step.label}: input {name!r} reads the tensor {tensor!r}, which no step writes and which is no "
                    f"input of the ensemble; there are {', '.join(map(repr, sorted({*inputs, *graph.writers})))}"
                )
    for spec in graph.outputs:
        if spec.name not in graph.writers:
            raise ModelLoadError(
                f"{source}: no step writes the output {spec.name!r} of the ensemble; steps write "
                f"{', '.join(map(repr, sorted(graph.writers)))}"
            )


def _require_read(graph: EnsembleGraph, inputs: set[str], source: Path) -> None:
    read = {tensor for step in graph.steps for tensor in step.inputs.values()} | {spec.name for spec in graph.outputs}
    unused = sorted(inputs - read)
    if unused:
        raise ModelLoadError(f"{source}: no step reads the input {unused[0]!r} of the ensemble; remove it, or map it")
    unread = sorted(graph.writers.keys() - read)
    if unread:
        writer = graph.steps[graph.writers[unread[0]]]
        raise ModelLoadError(
            f"{source}: {writer.label} writes the tensor {unread[0]!r}, which no step reads and which is no output of the "
            "ensemble; remove it from output_map"
        )


def dependency_order(nodes: Iterable[N], waits_for: Callable[[N], Iterable[N]]) -> tuple[list[N], list[N]]:
    """Sort nodes and all their dependencies, each after its own dependencies, or find a cycle.

    Returns:
        The order, and the nodes of one cycle along `waits_for`, which begins and ends with the same node. The cycle is empty if
        there is none; otherwise the order is incomplete.
    """
    order: dict[N, None] = {}
    for start in nodes:
        trail: dict[N, None] = {}
        open_nodes = [iter([start])]
        while open_nodes:
            node = next(open_nodes[-1], None)
            if node is None:
                open_nodes.pop()
                if trail:
                    order[trail.popitem()[0]] = None
            elif node in trail:
                way = list(trail)
                return list(order), [*way[way.index(node) :], node]
            elif node not in order:
                trail[node] = None
                open_nodes.append(iter(waits_for(node)))
    return list(order), []
