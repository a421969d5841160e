"""The controller of a cluster: a table of the living members, and calls that concern all of them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import DecodeError, Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import (
    LISTING,
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from halfserve.serve.fleet.control.cluster_index import cluster_index, cluster_status
from halfserve.serve.fleet.control.member_table import MemberEndedError, MemberRecord, MemberTable
from halfserve.serve.fleet.control.reports import Orders, Report
from halfserve.serve.fleet.control.wanted import Order, WantedStore, model_target, target_of
from halfserve.serve.fleet.member.fleet_commands import (
    COMMANDS,
    INDEX,
    LOAD,
    LOG_SETTINGS,
    METRICS,
    READ_COUNTERS,
    STATISTICS,
    TRACE_SETTING,
    UNLOAD,
    finished,
)
from halfserve.serve.fleet.member.member_counters import MemberCounters
from halfserve.serve.protocol.status import Code, error_of

logger = logging.getLogger(__name__)

ANSWER_S = 3.0  # added to a lease when waiting for the answers of all members, so that a member's end is noticed first
UPLOAD_BYTES = 2**24  # size limit of a model sent within a load request, because Ray Serve and all agents keep it in memory


class Controller:
    """Knows the living members, and has them carry out what concerns all. Lives on one event loop.

    It keeps nothing that it could not ask again: members report themselves, and the wanted state is in the store.
    """

    def __init__(self, wanted: WantedStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a controller without members; `clock` is in step with the event loop's time, in seconds."""
        self.id = uuid.uuid4().hex
        self._wanted = wanted
        self._clock = clock
        self._table = MemberTable(self.id, clock)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sums: deque[asyncio.Task[MemberCounters]] = deque()  # the sum in progress, and the one after it
        self._calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            INDEX: (pb.RepositoryIndexRequest, self._index),
            LOAD: (pb.RepositoryModelLoadRequest, self._load_request),
            UNLOAD: (pb.RepositoryModelUnloadRequest, self._unload_request),
            STATISTICS: (pb.ModelStatisticsRequest, self._statistics),
            METRICS: (empty_pb2.Empty, self._metrics),
            TRACE_SETTING: (pb.TraceSettingRequest, partial(self._change_settings, TRACE_SETTING)),
            LOG_SETTINGS: (pb.LogSettingsRequest, partial(self._change_settings, LOG_SETTINGS)),
        }

    async def exchange(self, report: Report) -> Orders:
        """Take a member's report and answer with its orders; see `MemberTable.exchange`."""
        return await self._table.exchange(report)

    async def call(self, path: str, request: bytes) -> bytes:
        """Answer a management RPC for the whole cluster; `path` is that of its method, or METRICS, and messages are serialized.

        Raises:
            InferenceError: the request is invalid, or the cluster could not carry it out.
        """
        if path not in self._calls:
            raise UnsupportedError(f"a cluster does not answer {path}; ask one of its members")
        kind, answer = self._calls[path]
        message = kind()
        try:
            message.ParseFromString(request)
        except DecodeError:
            raise InvalidArgumentError(f"the request of {path} is no {kind.DESCRIPTOR.name}") from None
        repository: str = getattr(message, "repository_name", "")
        if repository:
            raise InvalidArgumentError(f"repository {repository!r} is not known; there is one, without a name")
        await self._table.is_complete.wait()
        return (await answer(message)).SerializeToString()

    def status(self) -> dict[str, Any]:
        """Members, machines and models with their loads, as plain JSON values."""
        return {
            "controller": self.id,
            "is_recovering": not self._table.is_complete.is_set(),
            "directory_version": self._table.version,
            **cluster_status(list(self._table.members.values()), self._clock()),
        }

    def drain(self, member: str) -> None:
        """Have a member refuse new requests, answer the accepted ones, and leave, once other members serve its models.

        Raises:
            NotFoundError: the cluster has no such member.
        """
        record = self._table.members.get(member)
        if record is None:
            raise NotFoundError(f"the cluster has no member {member!r}; its status lists them")
        self._table.drain(record)

    async def reload(self, model: str | None = None) -> None:
        """Reload one model, or all, from the repository: at one member first, and at the others if that succeeds.

        Raises:
            NotFoundError: the model is not loaded.
            InferenceError: the first member refused, and all members keep what they served; or a later member refused.
        """
        await self._table.is_complete.wait()
        if model is not None:
            self._require(model)
        names = {name for one in self._table.staying() for name, state in one.report.models.items() if state.is_wanted}
        for name in sorted(names) if model is None else [model]:
            if not self._is_loaded(name):  # it was unloaded meanwhile
                continue
            request = await self._last_load(name) or pb.RepositoryModelLoadRequest(model_name=name)
            await self._load(name, request.SerializeToString())

    # Commands, which a client's end does not interrupt.

    async def _load_request(self, request: pb.RepositoryModelLoadRequest) -> Message:
        if not request.parameters:  # it keeps the configuration of the load before it, at members that join later too
            last = await self._last_load(request.model_name)
            if last is not None and list(last.parameters) == ["config"]:
                request = last
        data = request.SerializeToString()
        if len(data) > UPLOAD_BYTES:
            raise InvalidArgumentError(
                f"the request brings {len(data)} bytes of a model along, expected at most {UPLOAD_BYTES}, as every machine "
                "keeps them in memory; put the model into the repository"
            )
        await self._load(request.model_name, data)
        return pb.RepositoryModelLoadResponse()

    async def _last_load(self, name: str) -> pb.RepositoryModelLoadRequest | None:
        """Return the load in the wanted state of a model; None if it has none or an unload."""
        found = None
        for group in _groups(self._servers(name)):
            last = (await self._wanted.read(group)).get(model_target(name))
            if last is not None and last.path == LOAD:
                found = pb.RepositoryModelLoadRequest.FromString(last.request)
        return found

    async def _load(self, name: str, request: bytes) -> None:
        await finished(self._try_and_spread(name, Order.new(LOAD, request)), self._tasks)

    async def _try_and_spread(self, name: str, order: Order) -> None:
        """Have one member load a model; if it does not refuse, all other members load it, now and later."""
        async with self._lock(name):
            while True:
                first = next(iter(self._servers(name)), None)
                if first is None:
                    raise self._without_servers(name)
                try:
                    await self._ask(first, model_target(name), order)
                    break
                except MemberEndedError:
                    logger.info("another member decides on %s, as the first one is gone", name)
            try:
                await self._spread(name, order, first)
            except UnavailableError as error:
                raise UnavailableError(f"{first.title} has loaded model {name!r}, the others have not: {error}") from None

    async def _unload_request(self, request: pb.RepositoryModelUnloadRequest) -> Message:
        for name in request.parameters:
            if name != "unload_dependents":
                raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'unload_dependents'")
        self._require(request.model_name)
        request.parameters["unload_dependents"].bool_param = True  # the steps loaded with an ensemble
        await finished(self._unload(request.model_name, Order.new(UNLOAD, request.SerializeToString())), self._tasks)
        return pb.RepositoryModelUnloadResponse()

    async def _unload(self, name: str, order: Order) -> None:
        async with self._lock(name):
            self._require(name)
            await self._spread(name, order, None)

    async def _spread(self, name: str, order: Order, first: MemberRecord | None) -> None:
        """Make an order for a model the wanted state, and have all members but the first one carry it out.

        Raises:
            UnavailableError: the wanted state cannot be changed now.
            FailedPreconditionError: a member refused.
        """
        for group in _groups([*self._servers(name), *([] if first is None else [first])]):
            await self._wanted.change(group, {model_target(name): order})
        others = [one for one in self._servers(name) if one is not first]
        refusals = await asyncio.gather(*(self._refusal(one, model_target(name), order, None) for one in others))
        for one, refusal in zip(others, refusals, strict=True):
            if refusal is not None:
                raise FailedPreconditionError(f"{one.title} refused what others have done: {refusal}")

    async def _change_settings(self, path: str, request: Any) -> Message:
        """Apply settings that one member accepted to all members, present and future."""
        command = COMMANDS[path]
        orders = {
            target_of(kind, name): Order.new(path, one.SerializeToString()) for kind, name, one in command.targets(request)
        }
        for group in _groups(self._table.members.values()):
            await self._wanted.change(group, orders)
        asked = [(one, target) for one in self._table.members.values() for target in orders]
        refusals = await asyncio.gather(
            *(self._refusal(one, target, orders[target], self._table.lease_s + ANSWER_S) for one, target in asked)
        )
        for refusal in refusals:
            # A member whose start options differ from those of the first one may refuse a setting; its agent logs that.
            if isinstance(refusal, UnavailableError):
                raise refusal
        return command.answer()

    # Queries.

    async def _index(self, request: pb.RepositoryIndexRequest) -> Message:
        return cluster_index(list(self._table.members.values()), ready_only=request.ready)

    async def _statistics(self, request: pb.ModelStatisticsRequest) -> Message:
        answer = (await self._counters()).statistics
        if not request.name:
            return answer
        found = [one for one in answer.model_stats if one.name == request.name and request.version in {"", one.version}]
        if not found:
            what = f"model {request.name!r}" + (f" version {request.version!r}" if request.version else "")
            raise NotFoundError(f"{what} is not served; {LISTING} lists what is")
        return pb.ModelStatisticsResponse(model_stats=found)

    async def _metrics(self, _: Message) -> Message:
        """Return the metrics of all members together, as `MemberCounters` are serialized."""
        return wrappers_pb2.BytesValue(value=(await self._counters()).to_bytes())

    async def _counters(self) -> MemberCounters:
        """Sum the counters of all members, read after this call; concurrent calls share one sum.

        Raises:
            UnavailableError: a member did not send its counters in time.
        """
        if len(self._sums) < 2:
            before = self._sums[-1] if self._sums else None
            self._sums.append(asyncio.get_running_loop().create_task(self._sum(before)))
            self._sums[-1].add_done_callback(self._forget_sum)
        return await asyncio.shield(self._sums[-1])

    def _forget_sum(self, task: asyncio.Task[MemberCounters]) -> None:
        self._sums.remove(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved: all callers may be gone

    async def _sum(self, before: asyncio.Task[MemberCounters] | None) -> MemberCounters:
        if before is not None:
            await asyncio.wait({before})
        members = list(self._table.members.values())
        found = await asyncio.gather(*(self._counters_of(one) for one in members))
        # Summing runs on a thread, so that members receive their orders meanwhile.
        return await asyncio.to_thread(_added, [one for one in found if one is not None])

    async def _counters_of(self, record: MemberRecord) -> bytes | None:
        """Counters of a member; None if it has ended."""
        try:
            answer = await self._ask(record, "", Order.new(READ_COUNTERS, b""), self._table.lease_s + ANSWER_S)
            return wrappers_pb2.BytesValue.FromString(answer).value
        except MemberEndedError:
            return None
        except UnavailableError:
            if record.is_leaving:
                return None
            raise

    # Calls to members.

    async def _ask(self, record: MemberRecord, target: str, order: Order, limit_s: float | None = None) -> bytes:
        """Have a member carry out an order.

        Raises:
            InferenceError: the member refused it, or did not answer in time.
            MemberEndedError: the member ended before.
        """
        try:
            answer = await record.ask(target, order, limit_s)
        except TimeoutError:
            raise UnavailableError(
                f"{record.title} has not answered within {limit_s:g} s; ask again in a moment", retry_after_s=1.0
            ) from None
        if answer.status:
            raise error_of(Code[answer.status], answer.error)
        return answer.content

    async def _refusal(self, record: MemberRecord, target: str, order: Order, limit_s: float | None) -> InferenceError | None:
        """Have a member carry out an order; returns its error. A member that ends has none: its successor does as it should."""
        try:
            await self._ask(record, target, order, limit_s)
        except MemberEndedError:
            return None
        except InferenceError as error:
            return error
        return None

    def _servers(self, name: str) -> list[MemberRecord]:
        """Members whose group has a model: first the ones that serve it already, then by the order of joining."""
        return sorted((one for one in self._table.staying() if one.may_have(name)), key=lambda one: name not in one.served)

    def _without_servers(self, name: str) -> InferenceError:
        if self._table.staying():
            return NotFoundError(f"no servers of this cluster are for model {name!r}; start some with --models {name}")
        return UnavailableError("the cluster has no member now; wait until one has started")

    def _is_loaded(self, name: str) -> bool:
        return any(one.model(name).is_wanted for one in self._table.staying())

    def _require(self, name: str) -> None:
        """Check that a model is loaded in the cluster.

        Raises:
            NotFoundError: the model is not loaded.
        """
        if not self._is_loaded(name):
            raise NotFoundError(f"model {name!r} is not loaded; {LISTING} lists what is")

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _groups(members: Iterable[MemberRecord]) -> list[str]:
    return sorted({one.report.group for one in members})


def _added(all_counters: list[bytes]) -> MemberCounters:
    """Return the sum of the counters of several members."""
    total = MemberCounters()
    for counters in all_counters:
        total.add(MemberCounters.from_bytes(counters))
    return total
