"""The server's core, without a transport: the served models, their readiness, and the entry for requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.backend import CPU_PROVIDERS
from halfserve.serve.engine.caching.caching_scheduler import cache_answers
from halfserve.serve.engine.caching.response_cache import ResponseCache
from halfserve.serve.engine.dispatch.short_batches import LoopOccupancy
from halfserve.serve.engine.errors import (
    LISTING,
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    near_name,
)
from halfserve.serve.engine.hidden_steps import hide_names, hides_steps, names_hidden, without_names, without_names_in
from halfserve.serve.engine.model import Model, VersionState, VersionStates, VersionStatus, in_order
from halfserve.serve.engine.model_statistics import ServerFigures
from halfserve.serve.engine.pictures.decoding_threads import DecodingThreads
from halfserve.serve.engine.pictures.picture_scheduler import take_pictures
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from halfserve.serve.engine.queueing.step_memory import StepMemory
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence_loading import continues_sequence, hand_over, with_sequences

logger = logging.getLogger(__name__)


UNLOADED: Final = "unloaded"
NOT_LOADED: Final = "not loaded; RepositoryModelLoad loads it"
ON_DEMAND: Final = "available on demand: the next request loads it"
STOPPING: Final = "the server is shutting down; send the request to another replica"
Cancel = Callable[[], object]
Arrived = Callable[[InferenceError | None], None]  # gets None once the model serves, or the reason why it does not


class ModelLoader(Protocol):
    """Loads and unloads models at run time; implemented in serve/model_control/."""

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes], *, caller: str | None = None) -> None:
        """Load or reload a model; returns once it serves. `caller`: see `InferenceCore.load`."""

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model; returns once its accepted requests are answered. `dependents`: see `InferenceCore.unload`."""

    def override(self, name: str) -> str | None:
        """Return the configuration that replaces a model's own; see `InferenceCore.override`."""

    async def refresh(self) -> None:
        """Update `loadable` from the repository."""


class DemandLoader(Protocol):
    """Loads models when requests ask for them; implemented in serve/model_control/."""

    def brings(self, name: str) -> bool:
        """Return whether a request for a model that is not served would load it now, or wait for its load."""
        ...

    def join(self, name: str, time_left_s: float | None, arrived: Arrived) -> Cancel | None:
        """Begin the load of a model that is not served, or wait for it; see `InferenceCore.demand`."""

    def close(self) -> None:
        """Begin no more loads, and fail the requests that wait for one."""


class InferenceCore:
    """Holds the loaded models. Used on one event loop only.

    Attributes:
        states: states of versions that are loading, unloading, unavailable or refused.
        loadable: names of models that could be loaded by request.
        control: loads and unloads models at run time; None if only the models of the start are served.
        on_demand: loads models when requests ask for them; None if requests load nothing.
        slots: compute slots for the batches of all models on the CPU, set before there are models; None sets no bound.
        step_memory: memory for tensors between the steps of ensembles.
        pictures: threads that decode the pictures of all models.
        response_cache: cache for the models whose configuration asks for it, set like `slots`; None if the server has none.
        on_lost_device: called with the error of a device that is lost to this process; set like `slots`.
        needs_all_models: whether the server is ready only while every model is that was not unloaded.
    """

    def __init__(self, models: Iterable[Model]) -> None:
        self._models: dict[str, dict[int, Model]] = {}
        self.pictures = DecodingThreads()
        for model in models:
            self._models.setdefault(model.name, {})[model.version] = model
            take_pictures(model, self.pictures)
        self._leaving: dict[Model, asyncio.Task[None]] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._draining = self._retired = self._finishes_sequences = False
        self._changed = asyncio.Event()
        self.figures = ServerFigures()
        self._listeners: list[Callable[[], None]] = []
        self.states = VersionStates()
        self.loadable: frozenset[str] = frozenset()
        self.control: ModelLoader | None = None
        self.on_demand: DemandLoader | None = None
        self.slots: ComputeSlots | None = None
        self.step_memory = StepMemory()
        self.response_cache: ResponseCache | None = None
        self._occupancy = LoopOccupancy()
        self.on_lost_device: Callable[[str], None] = lambda _: None
        self.needs_all_models = False

    @property
    def is_ready(self) -> bool:
        """Whether load balancers should send requests here."""
        return not self._retired

    @property
    def is_ready_for_clients(self) -> bool:
        """Whether the server says that it is ready. With `needs_all_models` it does while every version is that was not
        unloaded; as in Triton, a model without versions, such as one with a wrong configuration, does not count.
        """
        if not self.is_ready or not self.needs_all_models:
            return self.is_ready
        silent = {VersionState.READY, VersionState.UNLOADING}
        return all(one.state in silent or not one.version or one.reason in {UNLOADED, ON_DEMAND} for one in self.index())

    @property
    def changed(self) -> asyncio.Event:
        """Event that is set at the next change of readiness. Get it before reading the state, so that no change is missed."""
        return self._changed

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever models or readiness change, before the next request is taken; it must not raise."""
        self._listeners.append(listener)

    def off_change(self, listener: Callable[[], None]) -> None:
        self._listeners.remove(listener)

    def models(self) -> list[Model]:
        """Return every served model version, sorted by name and version."""
        return [versions[v] for _, versions in sorted(self._models.items()) for v in sorted(versions)]

    def served(self, name: str) -> list[Model]:
        """Return the served versions of one model, oldest first; empty for an unknown model."""
        versions = self._models.get(name, {})
        return [versions[v] for v in sorted(versions)]

    def versions(self, name: str) -> list[Model]:
        """Return the served versions of one model, oldest first.

        Raises:
            NotFoundError: there is no model of this name.
            UnavailableError: the model is being loaded for the first time.
        """
        if name not in self._models:
            raise self._not_served(name)
        return self.served(name)

    def model(self, name: str, version: str = "") -> Model:
        """Return one model version; "" is the latest one.

        Raises:
            NotFoundError: there is no such model or version.
            UnavailableError: the model is being loaded for the first time.
            InvalidArgumentError: the version is not a number.
        """
        if not version:
            return self.versions(name)[-1]
        if not (version.isascii() and version.isdigit()):
            raise InvalidArgumentError(
                f"model version {version!r} is not a number; expected one such as '1', or '' for the latest"
            )
        served = self.versions(name)
        number = version.lstrip("0") or "0"  # compared as text: Python does not parse numbers of thousands of digits
        found = next((m for m in served if str(m.version) == number), None)
        if found is None:
            known = ", ".join(str(m.version) for m in served)
            text = f"model {name!r} has no version {version:.40}; served: {known}"
            raise self._unknown_version(text, name, number)
        return found

    def demand(self, name: str, time_left_s: float | None, arrived: Arrived) -> Cancel | None:
        """Wait for a model that requests load; begin its load if it is not under way.

        Args:
            name: name of the model.
            time_left_s: seconds until the client's deadline; None without one, for the limit of such waits.
            arrived: called once on the event loop, with None as soon as the model serves, before the next request is taken; or
                with the error that says why it does not serve in time.

        Returns:
            A function that ends the wait; None if no request loads this model, or if it is served.

        Raises:
            UnavailableError: the load failed a short time ago, or the server is draining.
            QueueFullError: too many requests wait for this model.
        """
        if self.on_demand is None:
            return None
        if self._draining:
            raise UnavailableError(STOPPING).like(TritonPhrase.STOPPING)
        return self.on_demand.join(name, time_left_s, arrived)

    async def arrival(self, name: str, version: str = "") -> Model:
        """Return one model version like `model`, after its load if a request for it loads it.

        Raises:
            InferenceError: see `model` and `demand`.
        """
        while True:
            try:
                return self.model(name, version)
            except (NotFoundError, UnavailableError):
                came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                cancel = self.demand(name, None, partial(_settle, came))
                if cancel is None:
                    raise
            try:
                await came
            finally:
                cancel()

    @property
    def loads_on_demand(self) -> bool:
        """Whether requests load models."""
        return self.on_demand is not None

    def comes_on_demand(self, name: str) -> bool:
        """Return whether a model is not served, and a request for it would load it now, or wait for its load."""
        return self.on_demand is not None and name not in self._models and self.on_demand.brings(name)

    def knows(self, name: str) -> bool:
        """Return whether the model is served, was served, was refused, or could be loaded."""
        return name in self._models or bool(self.states.of(name)) or name in self.loadable

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Return whether a model, or one version of it, is ready for requests. A model that a request would load is: clients
        that wait for it before they send a request would otherwise wait forever.

        Raises:
            NotFoundError: the model or version is unknown.
            InvalidArgumentError: the version is not a number.
        """
        served, known = self._models.get(name, {}), self.states.of(name)
        if not served and self.knows(name):
            return self.is_ready and self.comes_on_demand(name)
        if version and version in known and version not in map(str, served):
            return False
        asked = [self.model(name, version)] if version else served.values() or self.versions(name)
        return self.is_ready and any(model.is_ready for model in asked)

    async def says_ready(self, name: str, version: str = "") -> bool:
        """Return whether a model, or one version of it, is ready for requests and says so itself; see `is_model_ready`."""
        if not self.is_model_ready(name, version):
            return False
        if not self.served(name):
            return True  # a request would load it
        asked = [self.model(name, version)] if version else self.served(name)
        return any(await asyncio.gather(*(model.says_ready() for model in asked)))

    def index(self) -> list[VersionStatus]:
        """List every version that is served, being loaded or unloaded, or was refused, with the reason; and the loadable
        models.
        """
        resting = NOT_LOADED if self.on_demand is None else ON_DEMAND
        statuses = [
            VersionStatus(name=name, version="", state=VersionState.UNAVAILABLE, reason=resting)
            for name in self.loadable.difference(self._models, self.states.names())
        ]
        for name in self._models.keys() | self.states.names():
            known = self.states.of(name)
            served = {str(number) for number in self._models.get(name, {})}
            rests = self.on_demand is not None and name in self.loadable
            statuses += [
                replace(status, reason=ON_DEMAND) if rests and status.reason == UNLOADED else status
                for version, status in known.items()
                if version not in served
            ]
            for number, model in self._models.get(name, {}).items():
                version, fault = str(number), model.fault
                reason = fault or (known[version].reason if version in known else "")
                state = VersionState.UNAVAILABLE if fault else VersionState.READY
                if not self.is_ready:
                    state, reason = VersionState.UNLOADING, "the server is shutting down"
                statuses.append(VersionStatus(name=name, version=version, state=state, reason=reason))
        return in_order(statuses)

    def hides_steps(self, model: Model) -> bool:  # noqa: ARG002  (a restricted core has some to hide)
        """Return whether the models of which an ensemble consists are hidden from the caller."""
        return False

    def submit(self, model: Model, request: InferRequest) -> None:
        """Queue a request.

        Raises:
            UnavailableError: the server is draining.
            QueueFullError: the model's queue has reached its bound.
        """
        if self._draining and not (self._finishes_sequences and self._is_for_sequence(model, request)):
            refusal = UnavailableError(STOPPING)
            refusal.like(TritonPhrase.STOPPING)
            self.figures.refuse(refusal)
            raise refusal
        model.scheduler.submit(request)

    async def load(
        self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None, *, caller: str | None = None
    ) -> None:
        """Load a model from the repository, or reload it; a served one keeps serving until the new one replaces it.

        Args:
            name: name of a folder in the repository.
            config: a ModelConfig as JSON, in place of the folder's config.pbtxt. A load without one keeps that of the load
                before it, as long as the model is served and the files of the repository are the same.
            files: contents of a model folder by path ("1/model.onnx"), in place of the repository's; needs `config`.
            caller: model that is itself being loaded, and waits for this load; None without one.

        Raises:
            NotFoundError: the repository has no such model.
            InvalidArgumentError: the name, the configuration or a path is wrong.
            FailedPreconditionError: the model was refused, or it waits for `caller`; the message gives the reason.
            UnavailableError: loading by request is off, or the repository cannot be read now.
        """
        await self._controlled().load(name, config, files or {}, caller=caller)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload every version of a model; returns once their accepted requests are answered.

        `dependents`: whether to unload, with an ensemble, also the models that were loaded for its steps only.

        Raises:
            NotFoundError: the model is not served.
            UnavailableError: unloading by request is off.
        """
        await self._controlled().unload(name, dependents=dependents)

    def override(self, name: str) -> str | None:
        """Return the ModelConfig, as JSON, of the load request that a model is served with; None for that of the repository."""
        return None if self.control is None else self.control.override(name)

    async def refresh(self) -> None:
        """Update the list of loadable models from the repository, for `index`."""
        if self.control is not None:
            await self.control.refresh()

    def replace(self, name: str, models: Sequence[Model]) -> list[asyncio.Task[None]]:
        """Serve exactly these versions of a model from now on.

        Returns:
            Tasks that end when a version that is no longer served has answered its accepted requests.
        """
        before = self._models.pop(name, {})
        if models:
            self._models[name] = {model.version: model for model in models}
        hand_over(before, models)
        for model in models:
            if model in before.values():
                continue
            self.states.clear(name, model.version, VersionState.LOADING, VersionState.UNAVAILABLE, VersionState.UNLOADING)
            for instance in model.instances:
                instance.recovery.on_lost_device = self.on_lost_device
            model.share_loop(self._occupancy)
            cache_answers(model, self.response_cache)
            take_pictures(model, self.pictures)
            if self.figures.latencies.quantiles:
                model.statistics.keep_latencies()
            if not model.backends:  # a model that consists of other models
                continue
            if self.slots is not None and model.provider in CPU_PROVIDERS:
                model.compete(self.slots)
            elif model.limits.compute_weight != 1:
                reason = "it does not compute on the CPU" if self.slots else "the server has no --compute-slots"
                label = f"{model.name}/{model.version}"
                logger.warning("%s: halfserve.compute_weight has no effect, as %s", label, reason, extra={"model": label})
        gone = [model for model in before.values() if model not in models]
        leaving = [self._let_go(model) for model in gone]
        self.notify()
        return leaving

    def leaving(self, model: Model) -> asyncio.Task[None] | None:
        """Return the task that ends when a version that left service has answered its accepted requests; None if it has."""
        return self._leaving.get(model)

    def leaving_models(self) -> list[Model]:
        """Return the versions that left service, and still answer accepted requests."""
        return [*self._leaving]

    def notify(self) -> None:
        """Call the listeners for changes."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener()

    def retire(self) -> None:
        """Become not ready; requests that still arrive are accepted."""
        if not self._retired:
            self._retired = True
            self.notify()

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """Make `drain` wait for a task that uses answers after their models have given them."""
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def finish_sequences(self) -> None:
        """Refuse requests that do not continue a sequence, and return once all sequences have ended; at once without any."""
        running = with_sequences(self.models())
        if not running:
            return
        self._draining = self._finishes_sequences = True
        self.retire()
        try:
            await asyncio.gather(*(one.ended() for one in running))
        finally:
            self._finishes_sequences = False

    async def drain(self) -> None:
        """Refuse new requests and finish the accepted ones."""
        self._draining = True
        self.retire()
        if self.on_demand is not None:
            self.on_demand.close()
        await asyncio.gather(*(_end(model) for model in self.models()), *self._leaving.values())
        await asyncio.gather(*self._finishing)
        self.pictures.stop()

    async def clean_up(self) -> None:
        """Clean up every model whose requests had not ended when `drain` was abandoned."""
        self.pictures.stop()
        instances = [instance for model in [*self.models(), *self._leaving] for instance in model.instances]
        for instance in instances:
            instance.stop()
        for instance in instances:
            await instance.closed()

    def _is_for_sequence(self, model: Model, request: InferRequest) -> bool:
        """Return whether a request continues a sequence, also of an ensemble's step, or is a model's own call."""
        names = () if model.composition is None else model.composition.models
        steps = [step for name in names for step in self.served(name)]
        return bool(request.callers) or continues_sequence([model, *steps], request)

    def _let_go(self, model: Model) -> asyncio.Task[None]:
        version = str(model.version)
        if version not in {str(number) for number in self._models.get(model.name, {})}:
            self.states.set(model.name, version, VersionState.UNLOADING)
        task = asyncio.get_running_loop().create_task(_end(model))
        self._leaving[model] = task

        def left(_: asyncio.Task[None]) -> None:
            self._leaving.pop(model, None)
            status = self.states.of(model.name).get(version)
            if status is not None and status.state is VersionState.UNLOADING:
                self.states.set(model.name, version, VersionState.UNAVAILABLE, UNLOADED)
                self.notify()

        task.add_done_callback(left)
        return task

    def _controlled(self) -> ModelLoader:
        if self.control is None:
            text = "models are not loaded by request here; start the server with --model-control explicit"
            raise UnavailableError(text).like(TritonPhrase.NO_CONTROL)
        return self.control

    def _not_served(self, name: str) -> NotFoundError | UnavailableError:
        known = self.states.of(name)
        if any(status.state is VersionState.LOADING for status in known.values()):
            loading = UnavailableError(f"model {name!r} is being loaded; send the request again in a moment")
            return loading.like(TritonPhrase.NO_VERSION, model=name)
        if self.knows(name):
            gone = NotFoundError(f"model {name!r} is not served now; {LISTING} says why")
            return gone.like(TritonPhrase.NO_VERSION if any(known) else TritonPhrase.UNKNOWN_MODEL, model=name)
        near = near_name(name, dict.fromkeys(model.name for model in self.models()))
        unknown = NotFoundError(f"model {name!r} is not served here{near}; {LISTING} lists what is")
        return unknown.like(TritonPhrase.UNKNOWN_MODEL, model=name)

    def _unknown_version(self, text: str, name: str, version: str) -> NotFoundError:
        known = self.states.of(name).get(version)
        phrase = TritonPhrase.UNKNOWN_VERSION if known is None else TritonPhrase.VERSION_NOT_READY
        return NotFoundError(text).like(phrase, model=name, version=version)


def _settle(came: asyncio.Future[None], error: InferenceError | None) -> None:
    if came.done():
        return
    if error is None:
        came.set_result(None)
    else:
        came.set_exception(error)


async def _end(model: Model) -> None:
    """Let a model answer its accepted requests, including those of other models that need it, and stop its guard."""
    for holder in tuple(model.holders):
        await holder.released()
    await model.scheduler.drain()
    if model.guard is not None:
        model.guard.stop()


class RestrictedCore(InferenceCore):
    """View restricted to permitted models: for all others it answers like a core without them.

    It is itself a core without models, and forwards calls that concern visible models: a method that is not overridden here
    finds no models.
    """

    def __init__(self, core: InferenceCore, may_see: Callable[[str], bool]) -> None:
        super().__init__([])
        self._core = core
        self._may_see = may_see
        self.figures = core.figures
        core.on_change(self.notify)

    def close(self) -> None:
        """Hide all models, and notify the view's listeners."""
        self._core.off_change(self.notify)
        self._may_see = lambda _: False
        self.notify()

    @property
    def is_ready(self) -> bool:
        return self._core.is_ready

    @property
    def is_ready_for_clients(self) -> bool:
        return self._core.is_ready_for_clients

    def models(self) -> list[Model]:
        return [model for model in self._core.models() if self._may_see(model.name)]

    def served(self, name: str) -> list[Model]:
        return self._core.served(name) if self._may_see(name) else []

    def versions(self, name: str) -> list[Model]:
        return self._core.versions(name) if self.knows(name) else super().versions(name)

    def knows(self, name: str) -> bool:
        return self._may_see(name) and self._core.knows(name)

    def demand(self, name: str, time_left_s: float | None, arrived: Arrived) -> Cancel | None:
        if not self._may_see(name):
            return None

        def came(error: InferenceError | None) -> None:
            arrived(error if error is None else without_names_in(error, self._may_see))

        with names_hidden(self._may_see):
            return self._core.demand(name, time_left_s, came)

    @property
    def loads_on_demand(self) -> bool:
        return self._core.loads_on_demand

    def comes_on_demand(self, name: str) -> bool:
        return self._may_see(name) and self._core.comes_on_demand(name)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        if self._may_see(name):
            return self._core.is_model_ready(name, version)
        return super().is_model_ready(name, version)

    def index(self) -> list[VersionStatus]:
        seen = [status for status in self._core.index() if self._may_see(status.name)]
        return [replace(one, reason=without_names(one.reason, self._may_see)) for one in seen]

    def hides_steps(self, model: Model) -> bool:
        return hides_steps(model, self._may_see)

    def submit(self, model: Model, request: InferRequest) -> None:
        if not self.hides_steps(model):
            self._core.submit(model, request)
            return
        hide_names(request, self._may_see)
        with names_hidden(self._may_see):
            self._core.submit(model, request)

    def wait_for(self, task: asyncio.Task[None]) -> None:
        self._core.wait_for(task)

    async def load(
        self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None, *, caller: str | None = None
    ) -> None:
        if not self._may_see(name):
            text = f"the repository has no model {name!r}; {LISTING} lists what it has"
            raise NotFoundError(text).like(TritonPhrase.NOT_IN_REPOSITORY, model=name)
        with names_hidden(self._may_see):
            await self._core.load(name, config, files, caller=caller)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        if not self._may_see(name):
            raise NotFoundError(f"model {name!r} is not loaded; {LISTING} lists what is")
        await self._core.unload(name, dependents=dependents)

    def override(self, name: str) -> str | None:
        return self._core.override(name) if self._may_see(name) else None

    async def refresh(self) -> None:
        await self._core.refresh()
