"""Room for models that requests load: what was used longest ago is unloaded, and what is in use stays."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from halfserve.serve.engine.config.parameters import PINNED, own_parameter
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_repository import ModelFiles

MIB = 2**20
# Models that load at once when others must go for them: one is tried out while the next one is read. More would keep room from
# models that requests use, long before they need it.
LOADS_FOR_ROOM = 2
LOOK_S = 0.02  # between two looks for a model that has become idle: signals would cost each request
FREEING_S = 0.1  # time in which the memory of an unloaded model becomes free
PATIENCE_S = 60.0  # a load waits so long for models in use
SHORTEST_S = 0.05  # between two looks for models to unload

Unload = Callable[[str, str, int], Coroutine[Any, Any, None]]
OfModel = Callable[[str], bool]


class NoRoomError(ModelLoadError):
    """Models that are in use, or being loaded, leave no room for this one; later they may."""


class ModelRoom:
    """Unloads idle models: to make room for others, and after a time without requests. Lives on the event loop."""

    def __init__(self, core: InferenceCore, unload: Unload, *, keeps: OfModel, is_changing: OfModel, most_bytes: int) -> None:
        """Make room among the models of `core`.

        Args:
            core: has the models.
            unload: unloads a model, for a reason in words that is logged at this level; it takes the model out of service
                before it waits for anything.
            keeps: whether a model must stay, as it could not be loaded again as it is, or an ensemble that is being loaded
                needs it.
            is_changing: whether a model is being loaded or unloaded.
            most_bytes: most bytes of all models; 0 for no bound.
        """
        self._core = core
        self._unload = unload
        self._keeps = keeps
        self._is_changing = is_changing
        self._most = most_bytes
        self._coming: dict[tuple[str, int], int] = {}  # bytes of the versions that are being loaded
        self._turn = asyncio.Lock()
        self._for_room = self._idle = 0
        figures = core.figures
        figures.gauge("halfserve_loaded_model_bytes", "Files of all loaded models, times their copies", lambda: self.loaded)
        figures.gauge("halfserve_loaded_model_bytes_limit", "Most of them, 0 for no bound", lambda: self._most)
        figures.counter("halfserve_models_unloaded_for_room_total", "Unloads for other models", lambda: self._for_room)
        figures.counter("halfserve_models_unloaded_idle_total", "Unloads of models without requests", lambda: self._idle)

    @property
    def loaded(self) -> int:
        """Bytes of the models that serve, or still answer accepted requests."""
        return sum(model.size_bytes for model in [*self._core.models(), *self._core.leaving_models()])

    @asynccontextmanager
    async def taken(self, files: ModelFiles, needed: int) -> AsyncIterator[None]:
        """Take room of `needed` bytes for a version until it serves; unload others for it, and wait for those in use.

        Raises:
            ModelLoadError: there is no room, and none will come.
        """
        async with self._turn:  # so that small models do not pass a large one forever
            while self._most and (taken := self.loaded + sum(self._coming.values())) + needed > self._most:
                said = f"{files.model}: takes at least {needed / MIB:.1f} MiB, and"
                left = self._most - sum(model.size_bytes for model in self._core.models() if _is_pinned(model))
                if needed > left:
                    of = f"{left / MIB:.1f} of {self._most / MIB:g} MiB"
                    raise ModelLoadError(f"{said} pinned models leave {of}; raise --max-loaded-mib, or pin fewer")
                if not await self.free(files.name, counted=True):
                    raise NoRoomError(
                        f"{said} models that are in use or being loaded take {taken / MIB:.1f} of {self._most / MIB:g} MiB "
                        "(--max-loaded-mib); try again later, or raise it"
                    )
            self._coming[files.name, files.version] = needed
        try:
            yield
        finally:
            del self._coming[files.name, files.version]

    async def free(self, name: str, *, counted: bool) -> bool:
        """Unload the model that was used longest ago, for the model `name`; wait for one that is in use.

        `counted`: only models of a known size help, and few loads at a time.

        Returns:
            False if there is none, or none became idle in time.
        """
        began_s = time.monotonic()
        while time.monotonic() - began_s < PATIENCE_S:
            models = self._removable(counted=counted)
            models.pop(name, None)  # serves until its new version does
            idle = {one: _last_used_ns(found) for one, found in models.items() if self._is_idle(one, found)}
            if idle and not (counted and len(self._coming) >= LOADS_FOR_ROOM):
                self._for_room += 1
                await self._unload(min(idle, key=idle.__getitem__), f"to make room for {name}", logging.DEBUG)
                if not counted:
                    await asyncio.sleep(FREEING_S)
                return True
            if not models and not (counted and (self._coming or self._core.leaving_models())):
                return False
            await asyncio.sleep(LOOK_S)
        return False

    async def unload_idle(self, after_s: float) -> None:
        """Unload models that had no request for `after_s` seconds, until this task is cancelled."""
        while True:
            now_ns, next_s = time.monotonic_ns(), after_s
            for name, models in self._removable(counted=False).items():
                left_s = after_s - (now_ns - _last_used_ns(models)) / 1e9
                if left_s > 0:
                    next_s = min(next_s, left_s)
                elif self._is_idle(name, models):
                    self._idle += 1
                    await self._unload(name, f"after {after_s:g} s without a request", logging.INFO)
                    next_s = 0.0  # look again at once: the models have changed, and the steps of an ensemble may follow
                    break
            await asyncio.sleep(max(SHORTEST_S, next_s))

    def _removable(self, *, counted: bool) -> dict[str, list[Model]]:
        """Return the versions of the models that may be unloaded once they are idle, by name."""
        found: dict[str, list[Model]] = {}
        for model in self._core.models():
            found.setdefault(model.name, []).append(model)
        return {name: models for name, models in found.items() if not self._keeps(name) and _helps(models, counted=counted)}

    def _is_idle(self, name: str, models: list[Model]) -> bool:
        return not self._is_changing(name) and all(model.is_idle for model in models)


def _helps(models: list[Model], *, counted: bool) -> bool:
    """Return whether unloading a model can free memory: by itself, or because its steps can be unloaded then."""
    if any(model.holders or _is_pinned(model) for model in models):
        return False
    return not counted or any(model.size_bytes or model.composition is not None for model in models)


def _is_pinned(model: Model) -> bool:
    return bool(own_parameter(model.config, PINNED))


def _last_used_ns(models: list[Model]) -> int:
    return max(model.last_used_ns for model in models)
