"""Loads and unloads the served models according to the control mode, changes of the repository, and requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any
from weakref import WeakValueDictionary

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.config.model_config import DeclaredConfig, config_from_json
from halfserve.serve.engine.config.parameters import PINNED, own_parameter
from halfserve.serve.engine.ensembles.graph import step_models
from halfserve.serve.engine.errors import (
    LISTING,
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    ModelLoadError,
    NotFoundError,
    UnavailableError,
    UnmetStepsError,
    Wording,
    near_name,
)
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.repository.model_loading import models_below, warms_up_code
from halfserve.serve.engine.repository.model_repository import ModelRepository, find_models
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.model_control.config_overrides import ConfigOverrides
from halfserve.serve.model_control.control_options import ALL, ControlMode, ControlOptions, start_error
from halfserve.serve.model_control.copies import ModelCopies
from halfserve.serve.model_control.load_on_demand import LoadOnDemand
from halfserve.serve.model_control.loader_thread import LoaderThread
from halfserve.serve.model_control.loader_threads import LoaderThreads
from halfserve.serve.model_control.model_room import ModelRoom, NoRoomError
from halfserve.serve.model_control.switch import Switch
from halfserve.serve.model_control.uploads import UploadedModels, check_name
from halfserve.serve.model_control.version_loading import VersionLoader
from halfserve.serve.model_control.watch import RepositoryWatch
from halfserve.serve.storage.repository_copy import RepositoryCopy

logger = logging.getLogger(__name__)

FEWEST_IN_SERVICE = 2  # models that load at once beside requests, as one of them may only wait


class ModelControl:
    """Loads and unloads the core's models by the control mode. Lives on the event loop."""

    def __init__(
        self,
        core: InferenceCore,
        repository: ModelRepository,
        loader: VersionLoader,
        options: ControlOptions,
        copy: RepositoryCopy | None = None,
    ) -> None:
        """`copy`: the local copy of models in object storage that `repository` reads; None for a local repository."""
        self._core = core
        self._repository = repository
        self._options = options
        self._threads = LoaderThreads(options.load_threads or usable_cores())
        # Listing models must not wait for a load, and therefore has a thread of its own; watching their files may take long.
        is_watching = options.mode is ControlMode.POLL
        has_lookout = options.loads_some or is_watching
        self._lookout = LoaderThread("lookout", works_long=is_watching) if has_lookout else None
        self._copies = None if copy is None else ModelCopies(copy, core)
        self._unreadable = False  # whether the repository's error has been logged
        self._switch = Switch(core, loader, self._threads, load_limit_s=options.load_limit_s)
        # The values are weak, so that a lock exists only while it is in use: clients choose the names.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._uploads = UploadedModels(core, self._threads, allowed=options.uploads)
        self._overrides = ConfigOverrides(repository, self._threads)
        self._nested: list[tuple[str, str]] = []  # models being loaded, each with a model that it waits for
        self._steps_in_use = Counter[str]()  # models of the steps of ensembles that are being loaded by request
        self._load_ended = asyncio.Event()  # set at the end of the next load by request
        self._tasks: set[asyncio.Task[None]] = set()
        self._loaded_as_steps: set[str] = set()  # models loaded for ensembles, and not by a request of their own
        self._refused_ensembles: set[str] = set()  # retried when another model has come, in the mode POLL
        if options.on_demand:
            self._switch.room = ModelRoom(
                core,
                self._unload_idle,
                keeps=self._keeps,
                is_changing=self._locks.__contains__,  # a task has the lock, or waits for it
                most_bytes=options.max_loaded_bytes,
            )
            core.on_demand = LoadOnDemand(core, lambda name: self._load(name, None, {}), self._task)
        core.control = self

    async def start(self) -> None:
        """Load the models of the start, and then watch the repository if the mode is POLL.

        Raises:
            ModelLoadError: a model cannot be served (unless `keep_going`), or there is no model. All are tried; see
                `start_error`.
        """
        options = self._options
        if self._copies is not None:
            await self._copies.start(_copied_at_start(options), keep_going=options.keep_going)
        watch = self._watch()
        if watch is not None:
            await watch.remember()
        wanted = await self._threads.run(_wanted_at_start, self._repository, options)
        refused, tried = await self._load_at_start(wanted)
        if refused and not options.keep_going:
            raise start_error(refused, has_others=len(tried) > len(refused))
        self._loaded_as_steps = tried.difference(wanted)
        self._switch.log_level = logging.INFO
        self._enter_service()
        if watch is not None:
            self._task(watch.run(self._follow))
        await self.refresh()
        if options.on_demand:
            loaded = len({model.name for model in self._core.models()})
            logger.info("%d of %d models are loaded; requests load the others", loaded, len(self._core.loadable))
            self._task(self._look_for_models())
        if self._switch.room is not None and options.idle_unload_s:
            self._task(self._switch.room.unload_idle(options.idle_unload_s))

    def close(self) -> None:
        """Stop watching and loading; a running load is abandoned."""
        for task in self._tasks:
            task.cancel()
        self._threads.stop()
        if self._lookout is not None:
            self._lookout.stop()
        self._uploads.close()
        if self._copies is not None:
            self._copies.close()

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes], *, caller: str | None = None) -> None:
        """Load or reload a model by request; see `InferenceCore.load`."""
        self._require_explicit("loaded")
        check_name(name)
        if caller is None:
            await self._load_for_client(name, config, files)
            return
        if caller in self._waited_for_by(name):
            raise FailedPreconditionError(
                f"model {caller!r} loads the model {name!r} in its initialize, which waits for {caller!r} itself; remove one "
                "of the two loads"
            )
        self._nested.append((caller, name))
        try:
            with self._threads.one_more():
                await asyncio.shield(self._task(self._load(name, config, files)))
        finally:
            self._nested.remove((caller, name))

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        """Unload a model by request; see `InferenceCore.unload`."""
        self._require_explicit("unloaded")
        check_name(name)
        if not self._core.knows(name):
            if Wording.as_triton:
                return
            raise NotFoundError(f"model {name!r} is not loaded; {LISTING} lists what is")
        await asyncio.shield(self._task(self._unload(name, dependents=dependents)))

    def override(self, name: str) -> str | None:
        """Return the configuration of the load request that a model is served with; None for that of the repository."""
        return self._overrides.get(name)

    async def _load_at_start(self, wanted: list[str]) -> tuple[dict[str, list[ModelLoadError]], set[str]]:
        """Load models at the same time, ensembles after the models of their steps.

        Code that runs in a warm-up may call the models before its own, as their order is the only one that such code can have.

        Returns:
            The refusals by model, and the names of all models that were tried, with those of steps.
        """
        log_level = logging.WARNING if self._options.keep_going else logging.DEBUG
        loads: dict[str, asyncio.Task[list[ModelLoadError]]] = {}

        async def load(model: str, before: list[asyncio.Task[list[ModelLoadError]]]) -> list[ModelLoadError]:
            if before:
                await asyncio.wait(before)
            return await self._bring_in(model, log_level=log_level)

        try:
            for name in wanted:
                below = await self._below(name)
                for model in [step for step in (*below, name) if step not in loads]:
                    needed = below if model == name else await self._below(model)
                    has_code = await self._threads.run(warms_up_code, self._repository, model)
                    before = [*loads.values()] if has_code else [loads[step] for step in needed]
                    loads[model] = asyncio.create_task(load(model, before))
            errors = await asyncio.gather(*loads.values())
        finally:
            for task in loads.values():
                task.cancel()
        return {model: found for model, found in zip(loads, errors, strict=True) if found}, set(loads)

    def _watch(self) -> RepositoryWatch | None:
        """Return what watches the repository in the mode POLL."""
        if self._lookout is None or self._options.mode is not ControlMode.POLL:
            return None
        return RepositoryWatch(
            self._repository,
            self._lookout,
            interval_s=self._options.poll_interval_s,
            settle_s=self._options.settle_s,
            refresh=None if self._copies is None else self._copies.follow,
        )

    def _enter_service(self) -> None:
        """Leave cores to the requests from now on."""
        self._threads.in_service = True
        if not self._options.load_threads:
            self._threads.most = max(FEWEST_IN_SERVICE, self._threads.most // 2)

    async def refresh(self) -> None:
        """Update the list of loadable models."""
        if self._lookout is None or not self._options.loads_some:
            return
        try:
            if self._copies is not None:
                await self._copies.look(self._lookout)
            self._core.loadable = frozenset(await self._lookout.run(self._repository.names))
            self._unreadable = False
        except ModelLoadError as error:
            if not self._unreadable:
                logger.warning("%s", error)
            self._unreadable = True

    async def _look_for_models(self) -> None:
        """Let requests load models that come into the repository later."""
        while True:
            await asyncio.sleep(self._options.poll_interval_s)
            await self.refresh()

    async def _load_for_client(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model of the repository, even if the client disconnects; its own files only for a client that waits.

        A model that hangs would otherwise block later loads until its time limit.
        """
        loading = self._task(self._load(name, config, files))
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            if files:
                loading.cancel()
            raise

    async def _load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        if self._copies is None or files:
            await self._load_local(name, config, files)
            return
        kept = self._overrides.get(name) if config is None else None
        declared = await self._declared(self._repository, name, config if kept is None else kept)
        async with self._copies.arriving(name, declared):
            if kept is None or await self._overrides.kept(name) is not None:
                await self._load_local(name, config, files)
                return
        async with self._copies.arriving(name, None):  # the repository's configuration may select other versions
            await self._load_local(name, config, files)

    async def _load_local(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        self._loaded_as_steps.discard(name)
        steps = [] if files else await self._steps_of_load(name, config)
        self._steps_in_use.update(steps)
        try:
            # The steps are loaded outside the ensemble's lock: nested locks could deadlock.
            async with self._lock(name):
                pass  # an unload request for a step, which takes out the ensemble first, has now taken out the step too
            refused_steps = await self._load_steps(steps)
            async with self._lock(name):
                if files:
                    repository, override = await self._uploads.store(name, config, files), None
                else:
                    repository, override = self._repository, await self._overrides.for_load(name, config)
                    config = None if override is None else override.config
                try:
                    await self._load_from(repository, name, config, refused_steps)
                finally:
                    self._uploads.drop_unused(name)
                self._overrides.set(name, override)
        finally:
            self._steps_in_use -= Counter(steps)
            ended, self._load_ended = self._load_ended, asyncio.Event()
            ended.set()

    async def _steps_of_load(self, name: str, config: str | None) -> list[str]:
        """Return the models of the steps of an ensemble that is to be loaded, with this configuration or the one it keeps."""
        if config is None:
            config = await self._overrides.kept(name)
        return await self._below(name, await self._declared(self._repository, name, config))

    async def _load_steps(self, steps: list[str]) -> list[str]:
        """Load the models of an ensemble's steps that are not served yet; returns the reasons of refusals."""
        reasons = []
        for step in steps:
            async with self._lock(step):
                if self._core.served(step):
                    continue
                refused = await self._switch.bring_in(self._repository, step)
                reasons += self._switch.reasons(self._repository, step, refused)
                _require_room(refused, reasons)
                if not refused:
                    self._loaded_as_steps.add(step)
        return reasons

    async def _declared(self, repository: ModelRepository, name: str, config: str | None) -> DeclaredConfig | None:
        """Parse the configuration that a load request brings; None if it brings none."""
        if config is None:
            return None
        try:
            return await self._threads.run(lambda: config_from_json(config, repository.path_of(name) / name))
        except InvalidArgumentError as error:
            error.like(TritonPhrase.NOT_IN_REPOSITORY, model=name)
            raise

    async def _below(self, name: str, declared: DeclaredConfig | None = None) -> list[str]:
        """Return the models that an ensemble needs, in the order to load them; none if the model itself cannot be loaded."""
        try:
            return await self._threads.run(models_below, self._repository, name, declared)
        except ModelLoadError:
            return []

    async def _load_from(self, repository: ModelRepository, name: str, config: str | None, refused_steps: list[str]) -> None:
        try:
            names = await self._threads.run(repository.names)
        except ModelLoadError as error:
            logger.warning("%s", error)
            raise UnavailableError("the repository cannot be read now; the server's log says why") from None
        if name not in names:
            text = f"the repository has no model {name!r}{near_name(name, names)}; {LISTING} lists what it has"
            raise NotFoundError(text).like(TritonPhrase.NOT_IN_REPOSITORY, model=name)
        declared = await self._declared(repository, name, config)
        refused = await self._switch.bring_in(repository, name, declared)
        if refused:
            reasons = [*refused_steps, *self._switch.reasons(repository, name, refused)]
            _require_room(refused, reasons)
            text = f"model {name!r} was refused: {'; '.join(reasons)}"
            is_polled = len(await self._threads.run(repository.having, name)) == 1
            raise FailedPreconditionError(text).like(
                TritonPhrase.LOAD_FAILED if is_polled else TritonPhrase.NOT_IN_REPOSITORY, model=name
            )

    async def _unload(self, name: str, *, dependents: bool) -> None:
        while self._steps_in_use[name] > 0:  # an ensemble that is being loaded needs it
            await self._load_ended.wait()
        # A request loads an ensemble again with its steps, but not a step of a loaded ensemble.
        for ensemble in self._ensembles_on_demand(name):
            await self._unload(ensemble, dependents=False)
        steps = self._steps(name)
        async with self._lock(name):
            await self._switch.take_out(name)
            self._overrides.set(name, None)
            self._loaded_as_steps.discard(name)
            self._uploads.drop_unused(name)
        if not dependents:
            return
        in_use = {step for model in self._core.models() for step in self._steps(model.name)}
        for step in steps:
            if step in self._loaded_as_steps and step not in in_use:
                await self._unload(step, dependents=True)

    def _keeps(self, name: str) -> bool:
        """Return whether a model has what only a load request brought, or is a step of an ensemble that is being loaded."""
        return self._steps_in_use[name] > 0 or self._overrides.get(name) is not None or self._uploads.has(name)

    async def _unload_idle(self, name: str, why: str, level: int) -> None:
        async with self._lock(name):  # which is free, so that the model is still idle
            await self._switch.take_out(name, why, level)
            self._loaded_as_steps.discard(name)

    def _ensembles_on_demand(self, step: str) -> list[str]:
        """Return the served ensembles that need a model, and that requests can load again as they are."""
        if not self._options.on_demand:
            return []
        found = dict.fromkeys(model.name for model in self._core.models() if step in self._steps(model.name))
        return [name for name in found if not self._keeps(name)]

    def _steps(self, name: str) -> list[str]:
        """Return the models of the steps of a served ensemble; none for another model."""
        return list(dict.fromkeys(step for model in self._core.served(name) for step in step_models(model.config)))

    async def _follow(self, name: str, there: bool) -> None:
        """Load or unload a model whose files in the repository have changed."""
        # As in Triton, a model that has come to a second repository is served from neither.
        if not there or len(await self._threads.run(self._repository.having, name)) > 1:
            self._refused_ensembles.discard(name)
            async with self._lock(name):
                await self._switch.take_out(name)
        if not there:
            return
        for step in await self._below(name):
            if not self._core.served(step):
                await self._bring_in(step)
        if await self._bring_in(name):
            return
        for ensemble in sorted(self._refused_ensembles):  # the model may be what they lacked
            await self._bring_in(ensemble, log_level=logging.DEBUG)

    async def _bring_in(self, name: str, *, log_level: int = logging.WARNING) -> list[ModelLoadError]:
        """Serve the repository's present versions of a model; `log_level` is the level at which refusals are logged."""
        async with self._lock(name):
            refused = await self._switch.bring_in(self._repository, name)
        self._refused_ensembles.discard(name)
        for error in refused:
            logger.log(log_level, "%s", error, extra={"model": name})
            if isinstance(error, UnmetStepsError):
                self._refused_ensembles.add(name)
        return refused

    def _require_explicit(self, done: str) -> None:
        if self._options.mode is not ControlMode.EXPLICIT:
            # Triton's status: clients that are written for it ask by it whether models are loaded by request.
            text = f"models are not {done} by request here; start the server with --model-control explicit"
            raise UnavailableError(text).like(TritonPhrase.NO_CONTROL)
        if not self._core.is_ready:
            raise UnavailableError("the server is shutting down; send the request to another replica")

    def _waited_for_by(self, name: str) -> set[str]:
        """Return a model and all models whose loads wait for its load."""
        found, after = set[str](), {name}
        while after:
            found |= after
            after = {loaded for caller, loaded in self._nested if caller in after} - found
        return found

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, InferenceError):
            logger.error("loading or watching models failed", exc_info=error)


def _copied_at_start(options: ControlOptions) -> dict[str, None] | None:
    """Return the models to copy from object storage; None stands for all."""
    everything = not options.loads_some or ALL in options.load_at_start
    return None if everything else dict.fromkeys(options.load_at_start)


def _require_room(refused: list[ModelLoadError], reasons: list[str]) -> None:
    if any(isinstance(error, NoRoomError) for error in refused):
        raise UnavailableError("; ".join(reasons))


def _is_pinned(repository: ModelRepository, name: str) -> bool:
    try:
        return bool(own_parameter(repository.config(name).message, PINNED))
    except ModelLoadError:  # the load of the model reports the error
        return False


def _wanted_at_start(repository: ModelRepository, options: ControlOptions) -> list[str]:
    names = repository.names()
    if options.loads_some:
        missing = sorted(set(options.load_at_start) - {*names, ALL})
        if missing:
            raise ModelLoadError(
                f"{repository}: has no model {missing[0]!r} to load at the start; it has {', '.join(names) or 'none'}"
            )
        if ALL in options.load_at_start:
            return names
        pinned = [name for name in names if options.on_demand and _is_pinned(repository, name)]
        return list(dict.fromkeys([*options.load_at_start, *pinned]))
    if not names and options.mode is ControlMode.NONE:
        find_models(repository.paths[0])  # raises a ModelLoadError that names the problem
    return names
