"""Room for models that requests load: what was used longest ago is unloaded, and what is in use stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfserve.serve.engine.config.parameters import PINNED, own_parameter
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model

MIB = 2**20
# Models that load at once when others must go for them: one is tried out while the next one is read. More would keep room from
# models that requests use, long before they need it.
LOADS_FOR_ROOM = 2
LOOK_S = 0.05  # between two looks for a model that has become idle: signals would cost each request
FREEING_S = 0.1  # time in which the memory of an unloaded model becomes free
PATIENCE_S = 10.0  # a load that no request waits for waits so long for room
SHORTEST_S = 0.05  # between two looks for models to unload

Unload = Callable[[str, str], Coroutine[Any, Any, None]]
Is = Callable[[], bool]
OfModel = Callable[[str], bool]


class ModelRoom:
    """Unloads idle models: to make room for others, and after a time without requests. Lives on the event loop.

    Attributes:
        refusals: number of models that were refused because others were in use.
    """

    def __init__(
        self,
        core: InferenceCore,
        unload: Unload,
        *,
        keeps: OfModel,
        is_changing: OfModel,
        is_awaited: Is,
        most_bytes: int,
    ) -> None:
        """Make room among the models of `core`.

        Args:
            core: has the models.
            unload: unloads a model, for a reason in words; it takes the model out of service before it waits for anything.
            keeps: whether a model must stay, as it could not be loaded again as it is, or an ensemble that is being loaded
                needs it.
            is_changing: whether a model is being loaded or unloaded.
            is_awaited: whether requests wait for a load.
            most_bytes: most bytes of all models; 0 for no bound.
        """
        self._core = core
        self._unload = unload
        self._keeps = keeps
        self._is_changing = is_changing
        self._is_awaited = is_awaited
        self._most = most_bytes
        self._coming: dict[tuple[str, int], int] = {}  # bytes of the versions that are being loaded
        self._came = asyncio.Event()  # set at the end of each load
        self._turn = asyncio.Lock()
        self.refusals = self._for_room = self._idle = 0
        figures = core.figures
        figures.gauge("halfserve_loaded_model_bytes", "Files of all loaded models, times their copies", lambda: self.loaded)
        figures.gauge("halfserve_loaded_model_bytes_limit", "Most of them, 0 for no bound", lambda: self._most)
        figures.counter("halfserve_models_unloaded_for_room_total", "Unloads for other models", lambda: self._for_room)
        figures.counter("halfserve_models_unloaded_idle_total", "Unloads of models without requests", lambda: self._idle)

    @property
    def loaded(self) -> int:
        """Bytes of the models that serve, or still answer accepted requests."""
        return sum(model.size_bytes for model in [*self._core.models(), *self._core.leaving_models()])

    @property
    def _pinned(self) -> int:
        return sum(model.size_bytes for model in self._core.models() if own_parameter(model.config, PINNED))

    @contextmanager
    def coming(self, name: str, version: int) -> Iterator[None]:
        """Count the room of a version that is being loaded from `take` to the end of this context."""
        try:
            yield
        finally:
            self._coming.pop((name, version), None)
            self._came.set()

    async def take(self, model: Path, name: str, version: int, needed: int) -> None:
        """Take room of `needed` bytes for a version; unload others for it, and wait for those that are in use.

        Raises:
            ModelLoadError: there is no room, and none will come.
        """
        async with self._turn:  # so that small models do not pass a large one forever
            while self._most and self.loaded + sum(self._coming.values()) + needed > self._most:
                if needed + self._pinned <= self._most and len(self._coming) >= LOADS_FOR_ROOM:
                    self._came.clear()
                    await self._came.wait()
                elif needed + self._pinned > self._most or not await self.free(name, counted=True):
                    raise ModelLoadError(self._no_room(model, needed))
            self._coming[name, version] = needed

    async def free(self, name: str, *, counted: bool) -> bool:
        """Unload the model that was used longest ago, for the model `name`; wait for one that is in use.

        `counted`: only models of a known size help.

        Returns:
            False if there is none, or none became idle in time.
        """
        began_s = time.monotonic()
        while True:
            models = self._removable(counted=counted)
            models.pop(name, None)  # serves until its new version does
            idle = {one: found for one, found in models.items() if self._is_idle(one, found)}
            if idle:
                oldest = min(idle, key=lambda one: _last_used_ns(idle[one]))
                self._for_room += 1
                await self._unload(oldest, f"to make room for {name}, as it was used longest ago")
                if not counted:
                    await asyncio.sleep(FREEING_S)
                return True
            is_hopeless = not models and not (counted and (self._coming or self._core.leaving_models()))
            if is_hopeless or not (self._is_awaited() or time.monotonic() - began_s < PATIENCE_S):
                return False
            await asyncio.sleep(LOOK_S)

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
                    await self._unload(name, f"after {after_s:g} s without a request")
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

    def _no_room(self, model: Path, needed: int) -> str:
        said = f"{model}: takes at least {needed / MIB:.1f} MiB"
        if needed > self._most:
            return f"{said}, and all models together may take {self._most / MIB:g} MiB; raise --max-loaded-mib"
        if needed + self._pinned > self._most:
            left = (self._most - self._pinned) / MIB
            return f"{said}, and the pinned models leave {left:.1f} MiB of --max-loaded-mib; raise it, or pin fewer"
        self.refusals += 1
        taken = self.loaded + sum(self._coming.values())
        return (
            f"{said}, and models that are in use or being loaded take {taken / MIB:.1f} of {self._most / MIB:g} MiB "
            "(--max-loaded-mib); try again later, or raise it"
        )


def _helps(models: list[Model], *, counted: bool) -> bool:
    """Return whether unloading a model can free memory: by itself, or because its steps can be unloaded then."""
    if any(model.holders or own_parameter(model.config, PINNED) for model in models):
        return False
    return not counted or any(model.size_bytes or model.composition is not None for model in models)


def _last_used_ns(models: list[Model]) -> int:
    return max(model.last_used_ns for model in models)
