"""Brings versions of a model into service and takes them out: an old version serves until the new one is ready."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from halfserve.serve.engine.backend import ENSEMBLE, PYTHON
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.ensembles.composition import EnsembleComposition
from halfserve.serve.engine.ensembles.graph import is_ensemble
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model, VersionState
from halfserve.serve.engine.repository.model_loading import models_below
from halfserve.serve.engine.repository.model_repository import ModelFiles, ModelRepository
from halfserve.serve.model_control.load_memory import LoadMemory, needed_bytes
from halfserve.serve.model_control.loader_threads import LoaderThreads
from halfserve.serve.model_control.model_room import ModelRoom
from halfserve.serve.model_control.version_loading import VersionLoader
from halfserve.serve.model_control.watch import VersionFingerprint, version_fingerprint

logger = logging.getLogger(__name__)

T = TypeVar("T")
LEAVE_S = 30.0  # seconds to wait for a model's accepted requests before an unload returns anyway
RELOADING = "serves as it was loaded before; what is there now is being loaded"
OLD_ONE_SERVES = "serves as it was loaded before; what is there now was refused: "


class Switch:
    """Replaces the core's models, several models at a time. Lives on the event loop; the loader's threads do the work."""

    def __init__(self, core: InferenceCore, loader: VersionLoader, threads: LoaderThreads, *, load_limit_s: float) -> None:
        self._core = core
        self._loader = loader
        self._threads = threads
        self._load_limit_s = load_limit_s
        self._memory = LoadMemory()
        self._trial = asyncio.Lock()  # trials measure times, and therefore run one at a time
        self._fingerprints: dict[tuple[str, int], VersionFingerprint] = {}
        self.room: ModelRoom | None = None  # makes room for models; None if models are not unloaded for others
        self.log_level = logging.DEBUG  # level of messages about successes; DEBUG during the start

    async def bring_in(
        self, repository: ModelRepository, name: str, declared: DeclaredConfig | None = None
    ) -> list[ModelLoadError]:
        """Serve exactly the versions of a model that its policy selects. Unchanged versions keep serving.

        `declared` is a configuration in place of the model's own.

        Returns:
            The errors of refused versions. If there is one, no serving version is taken out.
        """
        try:
            found = await self._found(repository, name, declared)
        except ModelLoadError as error:
            self._refuse(repository, name, [*self._served(name)] or [""], error)
            return [error]
        for version in self._core.states.of(name).keys() - {str(files.version) for files, _ in found}:
            self._core.states.clear(name, version, VersionState.UNAVAILABLE)
        refused: list[ModelLoadError] = []
        # Requests that wait for the latest version must not be answered by an older one.
        for files, made in found if self.room is None else found[::-1]:
            if self._fingerprints.get((name, files.version)) == made and files.version in self._served(name):
                self._core.states.clear(name, files.version, VersionState.UNAVAILABLE)
                continue
            refusal = await self._bring_in_version(repository, files, made)
            if refusal is not None:
                refused.append(refusal)
        if not refused:
            wanted = {files.version for files, _ in found}
            self._core.replace(name, [model for version, model in self._served(name).items() if version in wanted])
        return refused

    def reasons(self, repository: ModelRepository, name: str, refused: list[ModelLoadError]) -> list[str]:
        """Return the refusals of the latest `bring_in` in the words of the repository index; some may be of earlier calls."""
        texts = tuple(_for_clients(str(error), repository) for error in refused)
        return list(dict.fromkeys(s.reason for s in self._core.states.of(name).values() if s.reason.endswith(texts)))

    async def take_out(self, name: str, why: str = "", level: int | None = None) -> None:
        """Stop serving a model; returns once its accepted requests are answered. The log gets the reason `why` at `level`."""
        for version in self._served(name):
            self._fingerprints.pop((name, version), None)
        leaving = self._core.replace(name, [])
        if leaving:
            logger.log(
                self.log_level if level is None else level, "%s: unloaded%s", name, why and f" {why}", extra={"model": name}
            )
            _, computing = await asyncio.wait(leaving, timeout=LEAVE_S)
            if computing:
                said = "%s: still computes what it had taken %g s ago; its memory is freed once it ends"
                logger.warning(said, name, LEAVE_S, extra={"model": name})

    async def _bring_in_version(
        self, repository: ModelRepository, files: ModelFiles, made: VersionFingerprint
    ) -> ModelLoadError | None:
        name, started = files.name, time.monotonic()
        label = f"{name}/{files.version}"
        reason = RELOADING if files.version in self._served(name) else ""
        self._core.states.set(name, files.version, VersionState.LOADING, reason)
        self._core.notify()
        try:
            model = await self._made(files)
            if isinstance(model.composition, EnsembleComposition):
                model.composition.connect(self._core)
        except ModelLoadError as error:
            self._refuse(repository, name, [files.version], error)
            return error
        except asyncio.CancelledError:
            self._refuse(
                repository,
                name,
                [files.version],
                ModelLoadError(f"{files.model}: its load was given up, because its client has gone"),
            )
            raise
        except Exception as error:
            logger.exception("%s: failed to load", label, extra={"model": label})
            unknown = ModelLoadError(f"{files.model}: {type(error).__name__} while it was loaded; the server's log says more")
            self._refuse(repository, name, [files.version], unknown)
            return unknown
        served = {**self._served(name), files.version: model}
        self._fingerprints[(name, files.version)] = made
        self._core.replace(name, list(served.values()))
        took_s = time.monotonic() - started
        logger.log(self.log_level, "%s: loaded and tried out in %.2f s", label, took_s, extra={"model": label})
        return None

    async def _found(
        self, repository: ModelRepository, name: str, declared: DeclaredConfig | None
    ) -> list[tuple[ModelFiles, VersionFingerprint]]:
        try:
            return await self._run(_look, repository, name, declared)
        except TimeoutError:
            raise ModelLoadError(
                f"{name}: its files were not looked at within {self._load_limit_s:g} s (--load-seconds); it is given up"
            ) from None

    async def _made(self, files: ModelFiles) -> Model:
        """Load, try out and start a version; either of both steps may take the time limit."""
        message = files.config.message
        copies = 0 if is_ensemble(message) else sum(max(1, group.count) for group in message.instance_group) or 1
        try:
            needed = await self._run(needed_bytes, files.model, copies) if copies else 0
            room = self.room if needed else None
            make_room = None if room is None else partial(room.free, files.name, counted=False)
            async with nullcontext() if room is None else room.taken(files, needed):
                async with self._memory.claimed(files.model, needed, make_room):
                    loaded = await self._run(self._loader.loaded, files)
                # The code of a Python model may load others while it is tried out, which then have their trials.
                is_free = loaded.interface.kind in {PYTHON, ENSEMBLE}
                async with nullcontext() if is_free else self._trial:
                    ready = await self._run(self._loader.ready, loaded)
                ready.size_bytes = needed
                return ready
        except TimeoutError:
            raise ModelLoadError(
                f"{files.model}: was not loaded and tried out within {self._load_limit_s:g} s (--load-seconds), and is given up"
            ) from None
        except OSError as error:  # an error of the file system, or too many files or threads; a stack trace would not help
            raise ModelLoadError(f"{files.model}: cannot be loaded: {error.strerror or error}") from None

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._threads.run(function, *arguments, limit_s=self._load_limit_s)

    def _refuse(self, repository: ModelRepository, name: str, versions: list[int] | list[str], error: ModelLoadError) -> None:
        reason = _for_clients(str(error), repository)
        for version in versions:
            old = OLD_ONE_SERVES if version in self._served(name) else ""
            self._core.states.set(name, version, VersionState.UNAVAILABLE, f"{old}{reason}")
        self._core.notify()

    def _served(self, name: str) -> dict[int, Model]:
        return {model.version: model for model in self._core.served(name)}


def _look(
    repository: ModelRepository, name: str, declared: DeclaredConfig | None
) -> list[tuple[ModelFiles, VersionFingerprint]]:
    path = repository.paths[0]
    try:
        path = repository.path_of(name)
        bare = path.is_file()
        found = repository.find(name, declared)
        models_below(repository, name, declared)  # refuses ensembles that need each other
        return [(files, version_fingerprint(files, bare=bare)) for files in found]
    except OSError as error:
        raise ModelLoadError(f"{path / name}: cannot be read: {error.strerror}") from None


def _for_clients(text: str, repository: ModelRepository) -> str:
    """Return an error's text with paths relative to the repository."""
    paths = [form for path in repository.paths for form in (path.resolve(), path)]
    for root in (*paths, *(path.parent for path in paths)):
        text = text.replace(f"{root}/", "")
    return text
