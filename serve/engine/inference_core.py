"""The server without a transport: which models there are, whether they are ready, and the way in for requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from serve.engine.backend import CPU_PROVIDERS
from serve.engine.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError
from serve.engine.figures.server_figures import ServerFigures
from serve.engine.instances.company import Company
from serve.engine.model import Model
from serve.engine.queueing.compute_slots import ComputeSlots
from serve.engine.repository.version_states import State, VersionStates, VersionStatus, in_order
from serve.engine.requests import InferRequest

logger = logging.getLogger(__name__)

NOT_LOADED = "not loaded; RepositoryModelLoad loads it"


class Control(Protocol):
    """Who loads and unloads models at run time; serve/control/ does."""

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load or reload a model; returns once it serves."""

    async def unload(self, name: str) -> None:
        """Take a model out; returns once what it had taken is answered."""

    async def refresh(self) -> None:
        """Look which models the repository holds."""


class InferenceCore:
    """Holds the loaded models. Lives on one event loop.

    Attributes:
        states: of the versions that are not simply served.
        loadable: models that could be loaded by request.
        control: loads and unloads at run time; None where what was loaded at the start is all.
        slots: for the batches of all models on the CPU, to be set before there are models; None lets each run when it wants.
        on_lost_device: is told what a copy's device said that computes for this process no more; to be set like `slots`.
    """

    def __init__(self, models: Iterable[Model]) -> None:
        self._models: dict[str, dict[int, Model]] = {}
        for model in models:
            self._models.setdefault(model.name, {})[model.version] = model
        self._leaving: dict[Model, asyncio.Task[None]] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._draining = self._retired = False
        self._changed = asyncio.Event()
        self.figures = ServerFigures()
        self._listeners: list[Callable[[], None]] = []
        self.states = VersionStates()
        self.loadable: frozenset[str] = frozenset()
        self.control: Control | None = None
        self.slots: ComputeSlots | None = None
        self._company = Company()
        self.on_lost_device: Callable[[str], None] = lambda _: None

    @property
    def is_ready(self) -> bool:
        """Whether new requests should be sent here."""
        return not self._retired

    @property
    def changed(self) -> asyncio.Event:
        """Is set when readiness next changes. Take it before reading what may change, so that no change is missed."""
        return self._changed

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever models or readiness change, before the next request is taken; it must not raise."""
        self._listeners.append(listener)

    def off_change(self, listener: Callable[[], None]) -> None:
        """Call it no more."""
        self._listeners.remove(listener)

    # What is served

    def models(self) -> list[Model]:
        """Every served model version, by name and version."""
        return [versions[v] for _, versions in sorted(self._models.items()) for v in sorted(versions)]

    def served(self, name: str) -> list[Model]:
        """The served versions of one model, oldest first; none where there is no such model."""
        versions = self._models.get(name, {})
        return [versions[v] for v in sorted(versions)]

    def versions(self, name: str) -> list[Model]:
        """The served versions of one model, oldest first.

        Raises:
            NotFoundError: no model of this name.
            UnavailableError: it is being loaded for the first time.
        """
        if name not in self._models:
            raise self._not_served(name)
        return self.served(name)

    def model(self, name: str, version: str = "") -> Model:
        """One model version; "" is the latest one.

        Raises:
            NotFoundError: no such model or version.
            UnavailableError: it is being loaded for the first time.
            InvalidArgumentError: the version is not a number.
        """
        if not version:
            return self.versions(name)[-1]
        if not (version.isascii() and version.isdigit()):
            raise InvalidArgumentError(
                f"model version {version!r} is not a number; expected one such as '1', or '' for the latest"
            )
        served = self.versions(name)
        number = version.lstrip("0") or "0"  # as text: Python reads no numbers of thousands of digits
        found = next((m for m in served if str(m.version) == number), None)
        if found is None:
            known = ", ".join(str(m.version) for m in served)
            raise NotFoundError(f"model {name!r} has no version {version:.40}; served: {known}")
        return found

    def knows(self, name: str) -> bool:
        """Whether the model is served, was served, was refused, or could be loaded."""
        return name in self._models or bool(self.states.of(name)) or name in self.loadable

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether requests for a model, or for one version of it, should be sent here.

        Raises:
            NotFoundError: nothing is known of it.
            InvalidArgumentError: the version is not a number.
        """
        served, known = self._models.get(name, {}), self.states.of(name)
        if not served and self.knows(name):
            return False
        if version and version in known and version not in map(str, served):
            return False
        asked = [self.model(name, version)] if version else served.values() or self.versions(name)
        return self.is_ready and any(model.is_ready for model in asked)

    def index(self) -> list[VersionStatus]:
        """Every version that is served, on its way in or out, or was refused, with the reason; and what could be loaded."""
        statuses = [
            VersionStatus(name=name, version="", state=State.UNAVAILABLE, reason=NOT_LOADED)
            for name in self.loadable - self._models.keys() - self.states.names()
        ]
        for name in self._models.keys() | self.states.names():
            known = self.states.of(name)
            served = {str(number) for number in self._models.get(name, {})}
            statuses += [status for version, status in known.items() if version not in served]
            for version in served:
                reason = known[version].reason if version in known else ""
                state = State.READY if self.is_ready else State.UNLOADING
                reason = reason if self.is_ready else "the server is shutting down"
                statuses.append(VersionStatus(name=name, version=version, state=state, reason=reason))
        return in_order(statuses)

    # Requests

    def submit(self, model: Model, request: InferRequest) -> None:
        """Queue a request.

        Raises:
            UnavailableError: the server is draining.
            QueueFullError: the model's queue has reached its bound.
        """
        if self._draining:
            refusal = UnavailableError("the server is shutting down; send the request to another replica")
            self.figures.refuse(refusal)
            raise refusal
        model.batcher.submit(request)

    # Changes

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model from the repository, or reload it; what serves goes on until the new one can take over.

        Args:
            name: of a folder in the repository.
            config: a ModelConfig as JSON to use in place of its config.pbtxt.
            files: contents of a model folder by path ("1/model.onnx"), to use in place of the repository's; needs `config`.

        Raises:
            NotFoundError: the repository has no such model.
            InvalidArgumentError: the name, the configuration or a path is wrong.
            FailedPreconditionError: loading by request is off here, or the model was refused; the text says why.
        """
        await self._controlled().load(name, config, files or {})

    async def unload(self, name: str) -> None:
        """Take every version of a model out; returns once what they had taken is answered.

        Raises:
            NotFoundError: no such model is served.
            FailedPreconditionError: unloading by request is off here.
        """
        await self._controlled().unload(name)

    async def refresh(self) -> None:
        """Look which models the repository holds, where it may be loaded from by request, so that `index` lists them."""
        if self.control is not None:
            await self.control.refresh()

    def replace(self, name: str, models: Sequence[Model]) -> list[asyncio.Task[None]]:
        """Serve exactly these versions of a model from now on.

        Returns:
            Tasks that end when a version which is not served any more has answered what it had taken.
        """
        before = self._models.pop(name, {})
        if models:
            self._models[name] = {model.version: model for model in models}
        for model in models:
            if model in before.values():
                continue
            self.states.clear(name, model.version, State.LOADING, State.UNAVAILABLE, State.UNLOADING)
            for instance in model.batcher.instances:
                instance.on_lost_device = self.on_lost_device
            model.batcher.company = self._company
            if self.slots is not None and model.provider in CPU_PROVIDERS:
                model.batcher.compete(self.slots)
            elif model.limits.compute_weight != 1:
                reason = "it does not compute on the CPU" if self.slots else "the server has no --compute-slots"
                logger.warning("%s/%s: halfserve.compute_weight has no effect, as %s", model.name, model.version, reason)
        gone = [model for model in before.values() if model not in models]
        leaving = [self._let_go(model) for model in gone]
        self.notify()
        return leaving

    def notify(self) -> None:
        """Tell everyone who listens that something has changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for listener in self._listeners:
            listener()

    def retire(self) -> None:
        """Say that no requests should be sent here any more; those that come all the same are still taken."""
        if not self._retired:
            self._retired = True
            self.notify()

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """Have `drain` wait for what is done with answers after their models have given them."""
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def drain(self) -> None:
        """Stop taking requests and finish those that were taken."""
        self._draining = True
        self.retire()
        await asyncio.gather(*(_end(model) for model in self.models()), *self._leaving.values())
        await asyncio.gather(*self._finishing)

    def _let_go(self, model: Model) -> asyncio.Task[None]:
        version = str(model.version)
        if version not in {str(number) for number in self._models.get(model.name, {})}:
            self.states.set(model.name, version, State.UNLOADING)
        task = asyncio.get_running_loop().create_task(_end(model))
        self._leaving[model] = task

        def left(_: asyncio.Task[None]) -> None:
            self._leaving.pop(model, None)
            status = self.states.of(model.name).get(version)
            if status is not None and status.state is State.UNLOADING:
                self.states.set(model.name, version, State.UNAVAILABLE, "unloaded")
                self.notify()

        task.add_done_callback(left)
        return task

    def _controlled(self) -> Control:
        if self.control is None:
            raise FailedPreconditionError(
                "models are not loaded by request here; start the server with --model-control explicit"
            )
        return self.control

    def _not_served(self, name: str) -> NotFoundError | UnavailableError:
        known = self.states.of(name)
        if any(status.state is State.LOADING for status in known.values()):
            return UnavailableError(f"model {name!r} is being loaded; send the request again in a moment")
        if self.knows(name):
            return NotFoundError(f"model {name!r} is not served now; RepositoryIndex says why")
        return NotFoundError(f"model {name!r} is not served here; RepositoryIndex lists what is")


async def _end(model: Model) -> None:
    """Let a model answer what it has taken, and stop what it does beside."""
    await model.batcher.drain()
    if model.guard is not None:
        model.guard.stop()
