"""The scheduler of an ensemble: begins a run for each request."""

from __future__ import annotations

import asyncio
from typing import Final

from halfserve.serve.engine.ensembles.composition import EnsembleComposition
from halfserve.serve.engine.ensembles.run import EnsembleRun
from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.whole_requests import require_many

SHUTTING_DOWN: Final = "the model is shutting down; send the request to another replica"
RETRY_S: Final = 1.0  # about the time in which a model is reloaded


class EnsembleScheduler:
    """Takes the requests of an ensemble. Lives on the event loop."""

    def __init__(self, composition: EnsembleComposition, statistics: Statistics) -> None:
        self._composition = composition
        self._statistics = statistics
        self._in_flight = 0
        self._is_draining = False
        self._idle = asyncio.Event()

    def submit(self, request: InferRequest) -> None:
        """Begin a request; see `Scheduler.submit`.

        Raises:
            UnavailableError: the ensemble is draining, or a step's model is not served or does not fit.
            UnsupportedError: a step is decoupled, and the request takes one response.
            QueueFullError: too many requests wait for memory for their tensors between the steps.
            InferenceError: the model of a first step refuses its request.
        """
        composition, binding = self._composition, self._composition.binding
        if self._is_draining or binding is None:
            away = UnavailableError(SHUTTING_DOWN) if self._is_draining else self._unbound()
            self._statistics.failed(request.arrived_ns, away)
            raise away
        if composition.is_decoupled:
            require_many(request, composition.graph.name)
        run = EnsembleRun(request, binding, composition.sizes, self._statistics, self._ended)
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
        self._composition.disconnect()

    def _ended(self) -> None:
        self._in_flight -= 1
        if not self._in_flight and self._is_draining:
            self._idle.set()

    def _unbound(self) -> UnavailableError:
        return UnavailableError(f"the ensemble cannot be computed now: {self._composition.own_fault}", retry_after_s=RETRY_S)
