"""Loads and unloads of models across the cluster: one member tries a load first, and the others follow if it succeeds."""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from halfserve.serve.engine.errors import FailedPreconditionError, NotFoundError, UnavailableError
from halfserve.serve.fleet.control.cluster_memory import ClusterMemory
from halfserve.serve.fleet.control.member_table import MemberRecord, MemberTable
from halfserve.serve.fleet.control.placement import PlacedModels
from halfserve.serve.fleet.control.reports import ModelOrder
from halfserve.serve.fleet.member.shared_rpcs import finished
from halfserve.serve.protocol.status import Code, error_of

logger = logging.getLogger(__name__)

SEEN_S = 1.0  # time until a report shows the result of an order


class ModelRollout:
    """Orders of all members, and their changes. Lives on the event loop. A change that has begun is always completed."""

    def __init__(self, table: MemberTable, memory: ClusterMemory, placed: PlacedModels) -> None:
        self._table = table
        self._members = table.members
        self._memory = memory
        self._placed = placed
        self._trials: dict[str, tuple[str, ModelOrder]] = {}  # by model: id of the first member, and its order
        self._coming = set[str]()  # models being loaded that still need a placement
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, request: bytes) -> None:
        """Load or reload a model; for `request` see `ModelOrder`. Returns when all members that are assigned it serve it.

        Raises:
            UnavailableError: the cluster has no member.
            InferenceError: the first member refused, and all members keep what they served; or a later member refused.
        """
        await finished(self._load(name, request), self._tasks)

    async def unload(self, name: str) -> None:
        """Unload a model. Returns when no member serves it any more.

        Raises:
            NotFoundError: the model is not loaded.
        """
        self.require(name)
        await finished(self._unload(name), self._tasks)

    def require(self, name: str) -> None:
        """Check that a model is loaded in the cluster.

        Raises:
            NotFoundError: the model is not loaded.
        """
        if name not in self._memory.loaded:
            raise NotFoundError(f"model {name!r} is not loaded; RepositoryIndex lists what is")

    def review(self, *, at_once: bool = False) -> None:
        """Recompute the placement of the models if that is due, or in any case if `at_once`."""
        models: dict[str, ModelOrder | None] = dict.fromkeys(self._coming)
        wanted = models | self._memory.loaded
        if self._placed.review(self._members.values(), wanted, self._table.clock(), at_once=at_once):
            self._table.wake_all()

    def orders(self, record: MemberRecord) -> dict[str, ModelOrder]:
        """Orders for a member now, by model."""
        tried = {name for name, (member, _) in self._trials.items() if member == record.id}
        names = {*self._placed.orders(record, self._memory.loaded, self._members), *tried}
        return {name: self._order(record, name) for name in names}

    def _order(self, record: MemberRecord, name: str) -> ModelOrder:
        member, trial = self._trials.get(name, ("", None))
        reported = record.model(name)
        order = trial if trial is not None and member == record.id else self._memory.loaded[name]
        if reported.generation == order.generation:
            return carried_out(order.generation)
        if reported.generation > order.generation and reported.error and reported.is_served:
            # This member tried the order first and failed; it still serves the model as before.
            return carried_out(reported.generation)
        return order

    async def _load(self, name: str, request: bytes) -> None:
        async with self._lock(name):
            order = self._memory.order(name, request)
            self._coming.add(name)
            try:
                self.review(at_once=True)
                await self._try(name, order)
            finally:
                self._coming.discard(name)
                self._placed.expire()
            self._memory.models = {**self._memory.loaded, name: order}
            self._memory.changed()
            self._table.wake_all()

            def waits() -> list[MemberRecord]:
                return [one for one in self._servers(name) if one.model(name).generation < order.generation]

            def refused() -> list[MemberRecord]:
                return [one for one in self._servers(name) if _has_failed(one, name, order)]

            await self._table.until(lambda: bool(refused()) or not waits())
            if refused():
                first = refused()[0]
                raise FailedPreconditionError(f"{first.title} refused what others have done: {first.model(name).error}")

    async def _try(self, name: str, order: ModelOrder) -> None:
        """Have one member carry out an order, and then make it the order of all members.

        Raises:
            InferenceError: the member refused.
            UnavailableError: the cluster has no member.
        """
        try:
            while (first := await self._decided(name, order)) is None:
                logger.info("another member decides on %s, as the first one is gone", name)
        finally:
            self._trials.pop(name, None)
            self._table.wake_all()
        if _has_failed(first, name, order):
            failed = first.model(name)
            raise error_of(Code[failed.status], failed.error)

    async def _decided(self, name: str, order: ModelOrder) -> MemberRecord | None:
        """Return the member that carried out or refused the order; None if the member ended first."""
        first = next(iter(self._servers(name)), None)
        if first is None and self._staying():
            raise FailedPreconditionError(
                f"no member has the memory for model {name!r}; start members with more, or unload other models"
            )
        if first is None:
            raise UnavailableError("the cluster has no member now; wait until one has started")
        self._trials[name] = first.id, order
        first.wake()
        await self._table.until(lambda: first.id not in self._members or first.model(name).generation >= order.generation)
        return first if first.id in self._members else None

    async def _unload(self, name: str) -> None:
        async with self._lock(name):
            self.require(name)
            self._memory.models = {one: order for one, order in self._memory.loaded.items() if one != name}
            self._placed.expire()
            self._memory.changed()
            self._table.wake_all()
            await self._table.until(lambda: not any(one.model(name).generation for one in self._staying()))
            # A model that an ensemble needs stays loaded, so this wait may time out.
            await self._table.until(lambda: not any(one.serves(name) for one in self._staying()), SEEN_S)

    def _staying(self) -> list[MemberRecord]:
        return [one for one in self._members.values() if not one.is_leaving]

    def _servers(self, name: str) -> list[MemberRecord]:
        """Members that are assigned a model: first the ones that serve it already, then by the order of joining."""
        found = [one for one in self._staying() if self._placed.has(one, name)]
        return sorted(found, key=lambda one: not one.serves(name))

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


@lru_cache(maxsize=4096)
def carried_out(generation: int) -> ModelOrder:
    """An order that its member has reported as carried out, so it needs no request."""
    return ModelOrder(generation=generation, request=b"")


def _has_failed(record: MemberRecord, name: str, order: ModelOrder) -> bool:
    model = record.model(name)
    return model.generation == order.generation and bool(model.error)
