"""Copy models from object storage before they are loaded."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.errors import ModelLoadError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.repository.model_loading import models_below
from halfserve.serve.engine.repository.model_repository import ModelRepository
from halfserve.serve.model_control.control_options import start_error
from halfserve.serve.model_control.loader_thread import LoaderThread
from halfserve.serve.storage.repository_copy import RepositoryCopy

logger = logging.getLogger(__name__)

Names = Mapping[str, DeclaredConfig | None]


class ModelCopies:
    """Keeps the models that are served or being loaded in the local copy. Lives on the event loop; threads do the work."""

    def __init__(self, copy: RepositoryCopy, core: InferenceCore) -> None:
        self._copy = copy
        self._core = core
        self._thread = LoaderThread("copies")  # of its own, because one update at a time may copy
        self._arriving: list[str] = []  # models that are being loaded; a name may come twice
        self._failing: set[str] = set()  # models whose failure has been logged

    def close(self) -> None:
        """Stop copying, and remove the copy's folder."""
        self._thread.stop()
        self._copy.close()

    async def start(self, names: Names | None, *, keep_going: bool) -> None:
        """Copy the models to load at the start; None stands for all.

        Raises:
            ModelLoadError: the store cannot be read, or a model cannot be copied (unless `keep_going`).
        """
        failures = await (self._update(None) if names is None else self._with_steps(names))
        if keep_going:
            self._report(failures)
        elif failures:
            raise start_error({name: [ModelLoadError(text)] for name, text in failures.items()}, has_others=True)

    async def follow(self) -> None:
        """Copy what has changed in the store.

        Raises:
            ModelLoadError: the store cannot be read.
        """
        self._report(await self._update(None))

    async def look(self, thread: LoaderThread) -> None:
        """Update the list of the store's models, on a thread that does not wait for loads.

        Raises:
            ModelLoadError: the store cannot be read.
        """
        await self._update({}, thread)

    @asynccontextmanager
    async def arriving(self, name: str, declared: DeclaredConfig | None) -> AsyncIterator[None]:
        """Copy a model, with the models that an ensemble needs, and keep them until they are loaded.

        Raises:
            UnavailableError: a model cannot be copied now.
        """
        self._arriving.append(name)
        try:
            try:
                failures = await self._with_steps({name: declared})
            except ModelLoadError as error:
                logger.warning("%s", error)
                raise UnavailableError("the repository cannot be read now; the server's log says why") from None
            for failure in failures.values():
                logger.warning("%s", failure)
            if failures:
                raise UnavailableError(f"model {min(failures)!r} cannot be copied now; the server's log says why")
            yield
        finally:
            self._arriving.remove(name)

    async def _with_steps(self, names: Names) -> dict[str, str]:
        wanted = dict(names)
        while True:
            failures = await self._update(wanted)
            steps = {step for name, declared in wanted.items() for step in await self._below(name, declared)}
            if steps <= wanted.keys():
                return failures
            wanted |= dict.fromkeys(steps - wanted.keys())

    async def _below(self, name: str, declared: DeclaredConfig | None) -> list[str]:
        try:
            return await self._thread.run(models_below, ModelRepository(self._copy.path), name, declared)
        except ModelLoadError:  # loading the model reports the error
            return []

    async def _update(self, names: Names | None, thread: LoaderThread | None = None) -> dict[str, str]:
        serving = {(model.name, model.version) for model in self._core.models()}
        arriving = frozenset(self._arriving)

        def update() -> dict[str, str]:
            return self._copy.update(names, serving=serving, arriving=arriving)

        return await (thread or self._thread).run(update)

    def _report(self, failures: Mapping[str, str]) -> None:
        """Log models that have begun to fail; each is tried again at the next update."""
        for name in failures.keys() - self._failing:
            logger.warning("%s", failures[name])
        self._failing = set(failures)
