"""The composition of an ensemble: follows the models of its steps as they are loaded, replaced and unloaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.ensembles.binding import Binding
from halfserve.serve.engine.ensembles.bound_step import TensorSource, sources_of
from halfserve.serve.engine.ensembles.graph import EnsembleGraph, EnsembleStep, dependency_order
from halfserve.serve.engine.errors import UnmetStepsError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.queueing.step_memory import RunSizes, StepMemory
from halfserve.serve.engine.requests import CallingExecution
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

logger = logging.getLogger(__name__)

NOT_CONNECTED: Final = "the ensemble is being loaded"


class EnsembleComposition:
    """The steps of an ensemble and their models. Lives on the event loop once it is connected.

    Attributes:
        graph: graph of the steps.
        label: name and version of the ensemble.
        binding: the graph with the models that are served for its steps now; None if they cannot compute it.
        sizes: sizes of the ensemble's runs.
        own_fault: reason why there is no binding; "" with one.
        is_decoupled: whether a step is decoupled, so that a request gets any number of responses.
    """

    def __init__(self, graph: EnsembleGraph, config: ModelConfig, source: Path, version: int) -> None:
        """`config`: the model's configuration, into which the steps are written; `source`: its file, for error texts."""
        self.graph = graph
        self.label = f"{graph.name}/{version}"
        self.binding: Binding | None = None
        self.sizes = RunSizes(StepMemory())  # replaced by the core's memory when the ensemble is connected
        self.own_fault = NOT_CONNECTED
        self.is_decoupled = False
        self._config = config
        self._source = source
        self._core: InferenceCore | None = None

    def connect(self, core: InferenceCore) -> None:
        """Find the models of the steps, and follow their changes. To be called once, before the ensemble is served.

        Raises:
            UnmetStepsError: a model is not served, or does not fit; the message names step and tensor.
        """
        found = self._found(core)
        if isinstance(found, str):
            raise UnmetStepsError(f"{self._source}: {found}")
        self._core = core
        self.sizes = RunSizes(core.step_memory)
        self._bind(found)
        core.on_change(self._follow)

    def disconnect(self) -> None:
        """Release the models of the steps, and follow them no longer."""
        if self._core is not None:
            self._core.off_change(self._follow)
            self._core = None
        if self.binding is not None:
            self.binding.retire()

    @property
    def fault(self) -> str:
        """Reason why the present models cannot compute the graph; "" if they can."""
        if self.binding is None:
            return self.own_fault
        for step in self.binding.steps:
            if step.model.fault:
                return f"{step.label}: {step.model.fault}"
        return ""

    @property
    def is_ready(self) -> bool:
        """Whether the model of every step is ready."""
        return self.binding is not None and all(model.is_ready for model in self.binding.models)

    @property
    def provider(self) -> str:
        """The steps' providers, each once."""
        return ", ".join(dict.fromkeys(model.provider for model in self._models()))

    @property
    def precision(self) -> str:
        """The steps' precisions, each once."""
        return ", ".join(dict.fromkeys(model.precision for model in self._models()))

    @property
    def models(self) -> frozenset[str]:
        """The names of the models of all steps, those of nested ensembles included."""
        below = (model.composition.models for model in self._models() if model.composition is not None)
        return frozenset(step.model for step in self.graph.steps).union(*below)

    def labels_of(self, output: str) -> Sequence[str]:
        return () if self.binding is None else self.binding.labels_of(output)

    @property
    def parts(self) -> list[str]:
        """One line per step, in their order; a step that is an ensemble is replaced by the lines of its steps."""
        return [line for model in self._models() for line in _lines(model)]

    def _models(self) -> tuple[Model, ...]:
        return () if self.binding is None else self.binding.models

    def _follow(self) -> None:
        """Bind the graph to the served models, which have changed."""
        if self._core is None:
            return
        found = self._found(self._core)
        if isinstance(found, str):
            if found != self.own_fault:
                logger.warning("%s: cannot be computed: %s", self.label, found, extra={"model": self.label})
            self._unbind(found)
        elif tuple(found) != self._models() or self.is_decoupled is not _is_decoupled(found):
            if self.own_fault:
                logger.info("%s: can be computed again", self.label, extra={"model": self.label})
            self._unbind("")
            self._bind(found)

    def _bind(self, models: list[Model]) -> None:
        self.own_fault = ""
        self.binding = Binding(self.graph, models, self._config.max_batch_size, CallingExecution(self.label))
        self.is_decoupled = _is_decoupled(models)
        if self.is_decoupled or self._config.HasField("model_transaction_policy"):
            self._config.model_transaction_policy.decoupled = self.is_decoupled
        parameters = self._config.parameters
        parameters["halfserve.provider"].string_value = self.provider
        parameters["halfserve.precision"].string_value = self.precision
        parameters["halfserve.steps"].string_value = "\n".join(self.parts)

    def _unbind(self, fault: str) -> None:
        self.own_fault = fault
        if self.binding is not None:
            self.binding.retire()
            self.binding = None

    def _found(self, core: InferenceCore) -> list[Model] | str:
        models = []
        for step in self.graph.steps:
            model = _served(core, step)
            if isinstance(model, str):
                return f"{step.label}: {model}"
            models.append(model)
        _, cycle = dependency_order([self.graph.name], lambda name: self._below(core, name))
        if cycle:
            return f"its steps lead back to it: {' -> '.join(map(repr, cycle))}; an ensemble cannot be a step of itself"
        if self._config.response_cache.enable and _is_decoupled(models):
            return "response_cache is for models with one answer to a request, but a step is decoupled; remove response_cache"
        return misfit(self.graph, models, self._config.max_batch_size) or models

    def _below(self, core: InferenceCore, name: str) -> list[str]:
        """Return the models of the steps of a served ensemble, or of this one."""
        if name == self.graph.name:
            return [step.model for step in self.graph.steps]
        made_of = (model.composition for model in core.served(name))
        return [
            step.model for ensemble in made_of if isinstance(ensemble, EnsembleComposition) for step in ensemble.graph.steps
        ]


def _served(core: InferenceCore, step: EnsembleStep) -> Model | str:
    """Return the served model of a step, or the reason why there is none."""
    served = core.served(step.model)
    if step.version is None and served:
        return served[-1]
    found = next((model for model in served if model.version == step.version), None)
    if found is not None:
        return found
    if not served:
        return "the model is not served; load or repair it, or correct model_name"
    return f"version {step.version} of the model is not served; served: {', '.join(str(model.version) for model in served)}"


def _is_decoupled(models: Sequence[Model]) -> bool:
    return any(model.is_decoupled for model in models)


def _lines(model: Model) -> list[str]:
    name = f"{model.name}/{model.version}"
    if model.composition is not None:
        return [f"{name} > {line}" for line in model.composition.parts]
    return [f"{name}  {model.provider}, {model.precision}{f', certificate {model.verdict}' if model.verdict else ''}"]


def misfit(graph: EnsembleGraph, models: Sequence[Model], max_batch_size: int) -> str | None:
    """Return why the models of the steps cannot compute the graph; None if they can.

    Two shapes fit if each size is equal or open (-1) on one side. Between a model with a batch dimension and one without, they
    also fit if only one of them begins with the batch dimension; such a batch has one row.

    `models`: models of the steps, in their order; `max_batch_size`: 0 for an ensemble without a batch dimension.
    """
    for step, model in zip(graph.steps, models, strict=True):
        wrong = _wrong_names(step, model) or _wrong_batch(model, max_batch_size)
        if wrong is not None:
            return f"{step.label}: {wrong}"
    mixed = _mixed_responses(graph, models)
    if mixed is not None:
        return mixed
    sources = sources_of(graph, models, batched=max_batch_size > 0)
    for step, model in zip(graph.steps, models, strict=True):
        for name, tensor in sorted(step.inputs.items()):
            what = f"{step.label}: input {name!r}"
            wrong = _differing(sources[tensor], tensor, model.inputs[name], what, batched=model.max_batch_size > 0)
            if wrong is not None:
                return wrong
    for spec in graph.outputs:
        what = f"output {spec.name!r} of the ensemble"
        wrong = _differing(sources[spec.name], spec.name, spec, what, batched=max_batch_size > 0)
        if wrong is not None:
            return wrong
    return None


def _wrong_names(step: EnsembleStep, model: Model) -> str | None:
    for kind, asked, known in (("input", step.inputs, model.inputs), ("output", step.outputs, model.outputs)):
        strange = sorted(asked.keys() - known.keys())
        if strange:
            return f"{kind}_map names {strange[0]!r}, but the model's {kind}s are {', '.join(map(repr, known))}"
    missing = [name for name, spec in model.inputs.items() if name not in step.inputs and not spec.optional]
    return f"input_map has no entry for input {missing[0]!r} of the model; map a tensor to it" if missing else None


def _mixed_responses(graph: EnsembleGraph, models: Sequence[Model]) -> str | None:
    """Return why responses of decoupled steps cannot be matched; None if each step, and the outputs, follow at most one."""
    followed: dict[int, int | None] = {}  # step's index -> index of the decoupled step that its outputs follow

    def mixed(indices: Iterable[int], what: str) -> str | None:
        counts = {followed[index] for index in indices}
        if len(counts) < 2:
            return None
        ways = sorted(graph.steps[index].label if index is not None else "no decoupled step" for index in counts)
        different = f"{what} come with different numbers of responses: after {' and after '.join(ways)}"
        return f"{different}; expected one of these for all"

    order, _ = dependency_order(range(len(graph.steps)), graph.waits_for)
    for index in order:
        before = graph.waits_for(index)
        wrong = mixed(before, f"{graph.steps[index].label}: its inputs")
        if wrong is not None:
            return wrong
        followed[index] = index if models[index].is_decoupled else next((followed[one] for one in before), None)
    return mixed((graph.writers[spec.name] for spec in graph.outputs), "the outputs of the ensemble")


def _wrong_batch(model: Model, max_batch_size: int) -> str | None:
    if 0 < model.max_batch_size < max_batch_size:
        return (
            f"the model's max_batch_size is {model.max_batch_size}, the ensemble's is {max_batch_size}; "
            f"set the ensemble's to {model.max_batch_size} or less"
        )
    return None


def _differing(source: TensorSource, tensor: str, spec: TensorSpec, what: str, *, batched: bool) -> str | None:
    given = source.spec
    if given.datatype is not spec.datatype:
        return (
            f"{what} is {spec.datatype.wire}, but the tensor {tensor!r} is {given.datatype.wire}, as {source.what}; "
            "put a step that casts between them"
        )
    if _meet(given.shape, spec.shape):
        return None
    if source.batched is not batched:
        dropped, other = (given.shape[1:], spec.shape) if source.batched else (given.shape, spec.shape[1:])
        if _meet(dropped, other):
            return None
    return f"{what} has shape {list(spec.shape)}, but the tensor {tensor!r} has shape {list(given.shape)}, as {source.what}"


def _meet(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or ANY_SIZE in {a, b} for a, b in zip(one, other, strict=True))
