"""Carries out the controller's orders at one server: loads and unloads models, one operation at a time for each model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InferenceError, NotFoundError, UnavailableError
from halfserve.serve.fleet.control.reports import ModelOrder
from halfserve.serve.fleet.member.member_socket import MemberChannel
from halfserve.serve.fleet.member.shared_rpcs import LOAD, UNLOAD
from halfserve.serve.protocol.status import status_name

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # delay before an order that failed temporarily (unreachable repository) is retried


@dataclass(frozen=True, kw_only=True)
class CarriedOut:
    """Result of the last load order of a model.

    Attributes:
        generation: generation of the order.
        error: reason of the failure; "" on success.
        status: name of the failure's gRPC status; "" on success.
        retry_s: time of the next attempt on time.monotonic()'s clock; None for no further attempt.
    """

    generation: int
    error: str = ""
    status: str = ""
    retry_s: float | None = None


class ModelOrders:
    """Orders to one server. Lives on the event loop.

    Attributes:
        done: result of the last order of each ordered model that is not unloaded.
    """

    def __init__(self, server: MemberChannel, changed: Callable[[], None]) -> None:
        """Start without orders; `changed` is called after each change of `done`."""
        self.done: dict[str, CarriedOut] = {}
        self._server = server
        self._changed = changed
        self._wanted: Mapping[str, ModelOrder] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}

    @property
    def are_carried_out(self) -> bool:
        """Whether every order was carried out or has failed."""
        return not self._busy

    def follow(self, wanted: Mapping[str, ModelOrder]) -> None:
        """Serve exactly these models from now on; `wanted` has the order of each, by name."""
        # The controller sends a request once; a known order arrives without it.
        known = self._wanted
        self._wanted = {
            name: known[name] if name in known and known[name].generation == order.generation else order
            for name, order in wanted.items()
        }
        for name in {*wanted, *self.done}:
            self._go_on(name)

    def close(self) -> None:
        """Stop carrying out orders; the server completes operations that it has begun."""
        self._wanted = {}
        for task in self._busy.values():
            task.cancel()

    def _go_on(self, name: str) -> None:
        if name in self._busy:
            return
        order, done = self._wanted.get(name), self.done.get(name)
        if order is None:
            if done is not None:
                self._begin(name, partial(self._unload, name))
        elif order.request and (done is None or done.generation != order.generation or self._is_due(done)):
            self._begin(name, partial(self._load, name, order))

    @staticmethod
    def _is_due(done: CarriedOut) -> bool:
        return done.retry_s is not None and time.monotonic() >= done.retry_s

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        async def carry_out() -> None:
            try:
                await work()
            finally:
                del self._busy[name]
            self._go_on(name)  # an order may have arrived meanwhile
            self._changed()

        self._busy[name] = asyncio.create_task(carry_out())

    async def _load(self, name: str, order: ModelOrder) -> None:
        done = CarriedOut(generation=order.generation)
        try:
            await self._server.call(LOAD, order.request, None)
        except InferenceError as error:
            later = time.monotonic() + RETRY_S if isinstance(error, UnavailableError) else None
            done = replace(done, error=str(error), status=status_name(error), retry_s=later)
            logger.warning("model %s cannot be loaded: %s", name, done.error, extra={"model": name})
        self.done[name] = done

    async def _unload(self, name: str) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=name)
        request.parameters["unload_dependents"].bool_param = True  # the steps loaded with an ensemble
        try:
            await self._server.call(UNLOAD, request.SerializeToString(), None)
        except NotFoundError:  # its load had failed
            pass
        except InferenceError as error:
            logger.warning("model %s cannot be unloaded: %s", name, error, extra={"model": name})
        self.done.pop(name, None)
