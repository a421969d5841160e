"""Carries out orders at one server: loads and unloads models and changes settings, one operation at a time for each of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InferenceError, NotFoundError, UnavailableError
from halfserve.serve.fleet.control.wanted import Order, Wanted, model_of_target, model_target
from halfserve.serve.fleet.member.fleet_commands import LOAD, UNLOAD
from halfserve.serve.fleet.member.member_socket import MemberChannel

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # delay before an order that failed temporarily (unreachable repository) is retried
START = "start"  # id of the orders that a server's wanted state begins with


@dataclass(frozen=True, kw_only=True)
class CarriedOut:
    """Result of the last order for a target.

    Attributes:
        order: the order.
        failure: error of the server; None on success.
        retry_s: time of the next attempt on time.monotonic()'s clock; None for no further attempt.
    """

    order: Order
    failure: InferenceError | None = None
    retry_s: float | None = None


class ServerOrders:
    """Orders to one server. Lives on the event loop.

    The wanted state says what the server does; the controller's calls are tried first, and become the wanted state afterwards.
    """

    def __init__(self, server: MemberChannel, changed: Callable[[], None]) -> None:
        """Start without orders; `changed` is called after each order of the wanted state."""
        self._server = server
        self._changed = changed
        self._initial: Wanted = {}
        self._wanted: Wanted = {}
        self._done: dict[str, CarriedOut] = {}
        self._changing: set[str] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def are_carried_out(self) -> bool:
        """Whether every order of the wanted state was carried out or has failed."""
        return not self._tasks

    @property
    def models(self) -> set[str]:
        """Names of the models that there are orders for."""
        return {name for target in {*self._wanted, *self._done} if (name := model_of_target(target)) is not None}

    def wants(self, model: str) -> bool:
        """Return whether the last order for a model loads it."""
        target = model_target(model)
        done = self._done.get(target)
        order = self._wanted.get(target) if done is None else done.order
        return order is not None and order.path == LOAD

    def is_changing(self, model: str) -> bool:
        return model_target(model) in self._changing

    def error(self, model: str) -> str:
        """Reason why the last load of a model failed; "" if it did not."""
        done = self._done.get(model_target(model))
        return "" if done is None or done.failure is None else str(done.failure)

    def begin(self, models: Iterable[str], wanted: Wanted) -> None:
        """Load these models of the repository, except where the wanted state says otherwise, and follow that."""
        self._initial = {model_target(name): _plain_order(LOAD, name) for name in models}
        self.follow(wanted)

    def follow(self, wanted: Wanted) -> None:
        """Carry out those orders of a new wanted state that the last one did not have."""
        before, self._wanted = self._wanted, {**self._initial, **wanted}
        for target in before.keys() - self._wanted.keys():
            name = model_of_target(target)
            if name is not None:
                self._start(target, _plain_order(UNLOAD, name))
        for target, order in self._wanted.items():
            if target not in before or before[target].id != order.id:
                self._start(target, order)

    def retry(self) -> None:
        """Try orders again that failed temporarily a while ago."""
        for target, done in list(self._done.items()):
            if done.retry_s is not None and time.monotonic() >= done.retry_s and target not in self._changing:
                self._done[target] = replace(done, retry_s=None)
                self._start(target, done.order, again=True)

    async def carry_out(self, target: str, order: Order, *, again: bool = False) -> bytes:
        """Carry out an order, unless that was done, and return the server's answer; without a target it is a query.

        Raises:
            InferenceError: the server refused it, and serves what it served before.
        """
        if not target:
            return await self._server.call(order.path, order.request, None)
        async with self._locks.setdefault(target, asyncio.Lock()):
            done = self._done.get(target)
            if done is not None and done.order.id == order.id and not again:
                if done.failure is not None:
                    raise done.failure
                return b""
            self._changing.add(target)
            try:
                await self._call(order)
            except InferenceError as error:
                if self._wanted.get(target) == order:
                    retry_s = time.monotonic() + RETRY_S if isinstance(error, UnavailableError) else None
                    self._done[target] = CarriedOut(order=order, failure=error, retry_s=retry_s)
                raise
            finally:
                self._changing.discard(target)
            self._done[target] = CarriedOut(order=order)
            return b""

    def close(self) -> None:
        """Stop carrying out orders; the server completes operations that it has begun."""
        for task in self._tasks:
            task.cancel()

    async def _call(self, order: Order) -> None:
        try:
            await self._server.call(order.path, order.request, None)
        except NotFoundError:
            if order.path != UNLOAD:  # the load of the model had failed
                raise

    def _start(self, target: str, order: Order, *, again: bool = False) -> None:
        task = asyncio.create_task(self._follow(target, order, again=again))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, target: str, order: Order, *, again: bool) -> None:
        try:
            await self.carry_out(target, order, again=again)
        except InferenceError as error:
            name = model_of_target(target)
            if name is None:
                logger.warning("a setting of the cluster cannot be taken over: %s", error)
            else:
                verb = "loaded" if order.path == LOAD else "unloaded"
                logger.warning("model %s cannot be %s: %s", name, verb, error, extra={"model": name})
        asyncio.get_running_loop().call_soon(self._changed)  # after this task has ended


def _plain_order(path: str, name: str) -> Order:
    if path == LOAD:
        return Order(id=START, path=LOAD, request=pb.RepositoryModelLoadRequest(model_name=name).SerializeToString())
    request = pb.RepositoryModelUnloadRequest(model_name=name)
    request.parameters["unload_dependents"].bool_param = True
    return Order(id=START, path=UNLOAD, request=request.SerializeToString())
