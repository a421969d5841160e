"""A served ensemble: takes its requests, and follows the models of its steps as they are loaded, replaced and unloaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.ensembles.binding import Binding
from halfserve.serve.engine.ensembles.fit import misfit
from halfserve.serve.engine.ensembles.graph import EnsembleGraph, EnsembleStep, dependency_order
from halfserve.serve.engine.ensembles.run import EnsembleRun
from halfserve.serve.engine.errors import UnavailableError, UnmetStepsError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.step_memory import RunSizes, StepMemory
from halfserve.serve.engine.requests import CallingExecution, InferRequest
from halfserve.serve.engine.whole_requests import require_many

logger = logging.getLogger(__name__)

SHUTTING_DOWN: Final = "the model is shutting down; send the request to another replica"
NOT_CONNECTED: Final = "the ensemble is being loaded"
RETRY_S: Final = 1.0  # about the time in which a model is reloaded


class Ensemble:
    """The scheduler and composition of an ensemble's model. Lives on the event loop once it is connected.

    Attributes:
        graph: graph of the steps.
        fault: reason why the present models cannot compute the graph; "" if they can.
        is_decoupled: whether a step is decoupled, so that a request gets any number of responses.
    """

    def __init__(self, graph: EnsembleGraph, config: ModelConfig, source: Path, statistics: Statistics, version: int) -> None:
        """`config`: the model's configuration, into which the steps are written; `source`: its file, for error texts."""
        self.graph = graph
        self._config = config
        self._source = source
        self._statistics = statistics
        self._label = f"{graph.name}/{version}"
        self._core: InferenceCore | None = None
        self._sizes = RunSizes(StepMemory())  # replaced by the core's memory when the ensemble is connected
        self._binding: Binding | None = None
        self.is_decoupled = False
        self._own_fault = NOT_CONNECTED
        self._in_flight = 0
        self._is_draining = False
        self._idle = asyncio.Event()

    def connect(self, core: InferenceCore) -> None:
        """Find the models of the steps, and follow their changes. To be called once, before the ensemble is served.

        Raises:
            UnmetStepsError: a model is not served, or does not fit; the message names step and tensor.
        """
        found = self._found(core)
        if isinstance(found, str):
            raise UnmetStepsError(f"{self._source}: {found}")
        self._core = core
        self._sizes = RunSizes(core.step_memory)
        self._bind(found)
        core.on_change(self._follow)

    @property
    def fault(self) -> str:
        if self._binding is None:
            return self._own_fault
        for step in self._binding.steps:
            if step.model.fault:
                return f"{step.label}: {step.model.fault}"
        return ""

    @property
    def is_ready(self) -> bool:
        """Whether the model of every step is ready."""
        return self._binding is not None and all(model.is_ready for model in self._binding.models)

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
        """See `Composition`."""
        return () if self._binding is None else self._binding.labels_of(output)

    @property
    def parts(self) -> list[str]:
        """One line per step, in their order; a step that is an ensemble is replaced by the lines of its steps."""
        return [line for model in self._models() for line in _lines(model)]

    def submit(self, request: InferRequest) -> None:
        """Begin a request; see `Scheduler.submit`.

        Raises:
            UnavailableError: the ensemble is draining, or a step's model is not served or does not fit.
            UnsupportedError: a step is decoupled, and the request takes one response.
            QueueFullError: too many requests wait for memory for their tensors between the steps.
            InferenceError: the model of a first step refuses its request.
        """
        binding = self._binding
        if self._is_draining or binding is None:
            away = UnavailableError(SHUTTING_DOWN) if self._is_draining else self._unbound()
            self._statistics.failed(request.arrived_ns, away)
            raise away
        if self.is_decoupled:
            require_many(request, self.graph.name)
        run = EnsembleRun(request, binding, self._sizes, self._statistics, self._ended)
        self._in_flight += 1
        run.start()

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone: steps in progress are cancelled, further ones are not computed."""
        request.cancelled = True
        if isinstance(request.line, EnsembleRun):
            request.line.cancel()

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and release the steps' models."""
        self._is_draining = True
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()
        if self._core is not None:
            self._core.off_change(self._follow)
            self._core = None
        if self._binding is not None:
            self._binding.retire()

    def _ended(self) -> None:
        self._in_flight -= 1
        if not self._in_flight and self._is_draining:
            self._idle.set()

    def _unbound(self) -> UnavailableError:
        return UnavailableError(f"the ensemble cannot be computed now: {self._own_fault}", retry_after_s=RETRY_S)

    def _models(self) -> tuple[Model, ...]:
        return () if self._binding is None else self._binding.models

    def _follow(self) -> None:
        """Bind the graph to the served models, which have changed."""
        if self._core is None:
            return
        found = self._found(self._core)
        if isinstance(found, str):
            if found != self._own_fault:
                logger.warning("%s: cannot be computed: %s", self._label, found, extra={"model": self._label})
            self._unbind(found)
        elif tuple(found) != self._models() or self.is_decoupled is not _is_decoupled(found):
            if self._own_fault:
                logger.info("%s: can be computed again", self._label, extra={"model": self._label})
            self._unbind("")
            self._bind(found)

    def _bind(self, models: list[Model]) -> None:
        self._own_fault = ""
        self._binding = Binding(self.graph, models, self._config.max_batch_size, CallingExecution(self._label))
        self.is_decoupled = _is_decoupled(models)
        if self.is_decoupled or self._config.HasField("model_transaction_policy"):
            self._config.model_transaction_policy.decoupled = self.is_decoupled
        parameters = self._config.parameters
        parameters["halfserve.provider"].string_value = self.provider
        parameters["halfserve.precision"].string_value = self.precision
        parameters["halfserve.steps"].string_value = "\n".join(self.parts)

    def _unbind(self, fault: str) -> None:
        self._own_fault = fault
        if self._binding is not None:
            self._binding.retire()
            self._binding = None

    def _found(self, core: InferenceCore) -> list[Model] | str:
        """Return the served models of the steps, or the reason why they cannot compute the graph."""
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
        return [step.model for ensemble in made_of if isinstance(ensemble, Ensemble) for step in ensemble.graph.steps]


def _served(core: InferenceCore, step: EnsembleStep) -> Model | str:
    """Return the served model of a step, or the reason why there is none."""
    served = core.served(step.model)
    if step.version is None and served:
        return served[-1]
    found = next((model for model in served if model.version == step.version), None)
    if found is not None:
        return found
    if not served:
        return "the model is not served; load it, or correct model_name"
    return f"version {step.version} of the model is not served; served: {', '.join(str(model.version) for model in served)}"


def _is_decoupled(models: Sequence[Model]) -> bool:
    return any(model.is_decoupled for model in models)


def _lines(model: Model) -> list[str]:
    """See `Composition.parts`."""
    name = f"{model.name}/{model.version}"
    if model.composition is not None:
        return [f"{name} > {line}" for line in model.composition.parts]
    parameters = model.config.parameters
    verdict = parameters["halfserve.certificate"].string_value if "halfserve.certificate" in parameters else ""
    return [f"{name}  {model.provider}, {model.precision}{f', certificate {verdict}' if verdict else ''}"]
