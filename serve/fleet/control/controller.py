"""The controller of a cluster: knows the members by their reports, orders what they serve, and answers for all of them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from google.protobuf import empty_pb2, wrappers_pb2
from google.protobuf.message import DecodeError, Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import (
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from halfserve.serve.fleet.control.cluster_index import cluster_index, cluster_status
from halfserve.serve.fleet.control.cluster_memory import ClusterMemory, added
from halfserve.serve.fleet.control.member_table import MemberRecord, MemberTable
from halfserve.serve.fleet.control.model_rollout import ModelRollout, carried_out
from halfserve.serve.fleet.control.placement import PlacedModels
from halfserve.serve.fleet.control.reports import LEASE_S, REPORT_S, Orders, Report
from halfserve.serve.fleet.member.member_counters import MemberCounters
from halfserve.serve.fleet.member.shared_rpcs import (
    COMMANDS,
    INDEX,
    LOAD,
    LOG_SETTINGS,
    METRICS,
    READY,
    STATISTICS,
    TRACE_SETTING,
    UNLOAD,
)
from halfserve.serve.observability.metrics import MetricTexts

logger = logging.getLogger(__name__)

HAND_OVER_S = 60.0  # time for other members to load the models of a leaving member
COUNTERS_S = 3.0  # added to a lease when waiting for the counters of all members, so that a member's end is noticed first
UPLOAD_BYTES = 2**24  # size limit of a model sent within a load request, because all agents keep it in memory
KEEPERS = 32  # agents that keep the controller's state; the longest-standing members are chosen


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """Options of the controller.

    Attributes:
        models_per_member: most models that one member serves; 0 for all.
    """

    models_per_member: int = 0


class Controller:
    """Knows all members and their orders; agents reach it through `ControllerLink`. Lives on one event loop."""

    def __init__(self, options: ControllerOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a controller without members.

        Args:
            options: options of the controller; None for the defaults.
            clock: monotonic time in seconds, in step with the event loop's time.
        """
        self.id = uuid.uuid4().hex
        self._options = options or ControllerOptions()
        self._clock = clock
        self._table = MemberTable(clock, self._look, self._lost)
        self._members = self._table.members
        self._memory = ClusterMemory()
        self._placed = PlacedModels(self._options.models_per_member)
        self._rollout = ModelRollout(self._table, self._memory, self._placed)
        self._recovered_at: float | None = clock() + LEASE_S  # end of the recovery after a start; None once recovered
        self._follows = False  # whether an earlier controller existed, as reports show
        self._ended_early: list[tuple[str, bytes, bool]] = []  # member, counters, whether they are exact
        self._counters_number = 0
        self._sums: deque[asyncio.Task[MemberCounters]] = deque()  # the sum in progress, and the one after it
        self._calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            INDEX: (pb.RepositoryIndexRequest, self._index),
            LOAD: (pb.RepositoryModelLoadRequest, self._load_request),
            UNLOAD: (pb.RepositoryModelUnloadRequest, self._unload_request),
            STATISTICS: (pb.ModelStatisticsRequest, self._statistics),
            READY: (pb.ModelReadyRequest, self._model_ready),
            METRICS: (empty_pb2.Empty, self._metrics),
            TRACE_SETTING: (pb.TraceSettingRequest, partial(self._change_settings, TRACE_SETTING)),
            LOG_SETTINGS: (pb.LogSettingsRequest, partial(self._change_settings, LOG_SETTINGS)),
        }

    async def exchange(self, report: Report) -> Orders:
        """Take a member's report and answer with its orders: at once if they are news to it, else after `report_s`.

        A later report of the same member ends the wait of an earlier one. In clusters of more than 100 members, the reports are
        less frequent and the leases longer than REPORT_S and LEASE_S, by a factor of at most 4.
        """
        self._table.look_regularly()
        record = self._take(report)
        if record is None:
            if not report.has_ended:
                await asyncio.sleep(REPORT_S)
            return Orders(controller=self.id)
        orders = self._orders(record)
        if report.controller == self.id and not record.is_news(orders, self._table.version):
            if not await record.wait(self._table.report_s):
                return orders
            orders = self._orders(record)
        record.tell(orders, directory=self._table.version, memory=self._memory.number)
        return orders

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
        await self._table.until(lambda: self._recovered_at is None)
        return (await answer(message)).SerializeToString()

    def status(self) -> dict[str, Any]:
        """Members, machines and models with their loads, as plain JSON values."""
        members = list(self._members.values())
        return {
            "controller": self.id,
            "is_recovering": self._recovered_at is not None,
            "directory_version": self._table.version,
            **cluster_status(members, self._memory.loaded, self._placed.has, self._clock()),
        }

    def drain(self, member: str) -> None:
        """Have a member refuse new requests, answer the accepted ones, and leave, once other members serve its models.

        Raises:
            NotFoundError: the cluster has no such member.
        """
        record = self._members.get(member)
        if record is None:
            raise NotFoundError(f"the cluster has no member {member!r}; its status lists them")
        record.drains = True
        self._placed.expire()
        if self._placed.awaits(record, self._members):
            record.hands_over_until = self._clock() + HAND_OVER_S
        self._table.changed(record)

    async def reload(self, model: str | None = None) -> None:
        """Reload one model, or all, from the repository: at one member first, and at the others if that succeeds.

        Raises:
            NotFoundError: the model is not loaded.
            InferenceError: the first member refused, and all members keep what they served; or a later member refused.
        """
        await self._table.until(lambda: self._recovered_at is None)
        if model is not None:
            self._rollout.require(model)
        for name in list(self._memory.loaded) if model is None else [model]:
            if name in self._memory.loaded:  # it may have been unloaded meanwhile
                await self._rollout.load(name, self._memory.loaded[name].request)

    # Reports from members.

    def _take(self, report: Report) -> MemberRecord | None:
        """Take in a report; returns None if the member has ended."""
        self._learn(report)
        for member, counters in report.left.items():
            self._end(member, counters)
        if report.has_ended:
            self._end(report.member, report.counters)
            return None
        if self._memory.ended.has(report.member):  # this report was overtaken by the member's last one
            return None
        if self._recovered_at is None and self._memory.ended.revive(report.member):
            self._memory.changed()
        record, has_changed = self._table.take(report)
        if has_changed:
            self._placed.expire()
        if self._recovered_at is None:
            self._begin()
        return record

    def _learn(self, report: Report) -> None:
        """Adopt orders and versions of earlier controllers from a report."""
        if self._recovered_at is not None:
            if report.controller and report.controller != self.id and not self._follows:
                self._follows, self._recovered_at = True, max(self._recovered_at, self._clock() + LEASE_S)
            if report.memory is not None:
                self._memory.adopt(report.memory)
        if report.controller != self.id:
            generations = [one.generation for one in report.models.values()]
            self._memory.generation = max([self._memory.generation, *generations])
        self._counters_number = max(self._counters_number, report.counters_number)
        self._table.learn_version(report.directory_version)

    def _end(self, member: str, counters: bytes | None) -> None:
        """Remove a member that has ended, and count its last counters."""
        record = self._members.get(member)
        if record is not None:
            logger.info("%s has left", record.title)
            self._table.end(member)
            if counters is None:
                self._lost(record)
        if counters is not None:
            self._count_ended(member, counters, exact=True)

    def _lost(self, record: MemberRecord) -> None:
        """Count the counters of a lost member as estimated from its last report, until exact ones arrive."""
        self._count_ended(record.id, record.last_counters(), exact=False)

    def _count_ended(self, member: str, counters: bytes, *, exact: bool) -> None:
        if self._recovered_at is not None:  # the state of the last controller may still arrive
            self._ended_early.append((member, counters, exact))
        elif self._memory.ended.end(member, counters, exact=exact):
            self._memory.changed()
            for keeper in self._keepers():
                self._members[keeper].wake()
        self._placed.expire()

    def _look(self, now: float) -> None:
        if self._recovered_at is not None and now >= self._recovered_at:
            self._recover()
        if self._recovered_at is None:
            self._rollout.review()
        for record in self._members.values():
            end = record.hands_over_until
            if end is not None and (now >= end or not self._placed.awaits(record, self._members)):
                record.hands_over_until = None
                self._table.changed(record)

    def _recover(self) -> None:
        """Finish the recovery: every live member had time to report, so this controller may decide now."""
        self._recovered_at = None
        ended, self._ended_early = self._ended_early, []
        for member, counters, exact in ended:
            self._count_ended(member, counters, exact=exact)
        for member in self._members:
            self._memory.ended.revive(member)
        self._begin()
        self._table.is_public = True
        self._table.changed()
        self._table.wake_all()

    def _begin(self) -> None:
        """Order the models of a new cluster, once a member has reported its repository."""
        if self._memory.models is not None:
            return
        offered = {name for record in self._members.values() for name in record.report.models}
        if offered:
            self._memory.begin(offered)
            self._placed.expire()
            self._table.wake_all()

    # Orders to members.

    def _orders(self, record: MemberRecord) -> Orders:
        if self._recovered_at is not None:
            kept = {
                name: carried_out(model.generation)
                for name, model in record.report.models.items()
                if model.is_served or model.generation
            }
            return Orders(controller=self.id, models=kept)
        memory, version = self._memory, self._table.version
        keeps = record.sent_memory != memory.number and record.id in self._keepers()
        return Orders(
            controller=self.id,
            models=self._rollout.orders(record),
            directory=self._table.directory if self._table.directory and record.report.directory_version != version else None,
            counters_number=self._counters_number,
            settings=memory.settings_since(record.report.settings_number),
            drain=record.drains and record.hands_over_until is None,
            memory=memory.to_bytes() if keeps else None,
        )

    def _keepers(self) -> Iterable[str]:
        if len(self._members) <= KEEPERS:
            return self._members
        return list(islice(self._members, KEEPERS))

    # Answers for the whole cluster.

    async def _load_request(self, request: pb.RepositoryModelLoadRequest) -> Message:
        data = request.SerializeToString()
        if len(data) > UPLOAD_BYTES:
            raise InvalidArgumentError(
                f"the request brings {len(data)} bytes of a model along, expected at most {UPLOAD_BYTES}, as every machine "
                "keeps them in memory; put the model into the repository"
            )
        await self._rollout.load(request.model_name, data)
        return pb.RepositoryModelLoadResponse()

    async def _unload_request(self, request: pb.RepositoryModelUnloadRequest) -> Message:
        for name in request.parameters:
            if name != "unload_dependents":
                raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'unload_dependents'")
        await self._rollout.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    async def _change_settings(self, path: str, request: Any) -> Message:
        """Apply settings that one member accepted to all members, present and future."""
        command = COMMANDS[path]
        self._memory.set({f"{kind} {name}": one.SerializeToString() for kind, name, one in command.targets(request)}, path)
        number, asked = self._memory.settings_number, set(self._members)
        self._table.wake_all()

        def missing() -> list[MemberRecord]:
            return [one for one in self._members.values() if one.id in asked and one.report.settings_number < number]

        limit_s = self._table.lease_s + COUNTERS_S
        if not await self._table.until(lambda: not missing(), limit_s):
            raise UnavailableError(f"{missing()[0].title} has not changed its settings within {limit_s:g} s; it does later")
        return command.answer()

    async def _index(self, request: pb.RepositoryIndexRequest) -> Message:
        return cluster_index(list(self._members.values()), self._memory.loaded, self._placed.has, ready_only=request.ready)

    async def _model_ready(self, request: pb.ModelReadyRequest) -> Message:
        models = [one.model(request.name) for one in self._members.values() if not one.is_leaving]
        ready = any(one.is_served and (not request.version or request.version in one.versions) for one in models)
        return pb.ModelReadyResponse(ready=ready)

    async def _statistics(self, request: pb.ModelStatisticsRequest) -> Message:
        answer = (await self._counters()).statistics
        if not request.name:
            return answer
        found = [one for one in answer.model_stats if one.name == request.name and request.version in {"", one.version}]
        if not found:
            what = f"model {request.name!r}" + (f" version {request.version!r}" if request.version else "")
            raise NotFoundError(f"{what} is not served; RepositoryIndex lists what is")
        return pb.ModelStatisticsResponse(model_stats=found)

    async def _metrics(self, _: Message) -> Message:
        """The Prometheus metrics of all members together."""
        texts = MetricTexts()
        texts.add((await self._counters()).metrics)
        return wrappers_pb2.BytesValue(value=texts.joined())

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
        self._counters_number += 1
        number = self._counters_number
        asked = set(self._members)
        self._table.wake_all()

        def missing() -> list[MemberRecord]:
            return [one for one in self._members.values() if one.id in asked and one.counters_number < number]

        limit_s = self._table.lease_s + COUNTERS_S
        if not await self._table.until(lambda: not missing(), limit_s):
            raise UnavailableError(
                f"{missing()[0].title} has not reported its counters within {limit_s:g} s; ask again in a moment",
                retry_after_s=1.0,
            )
        living = [record.counters for record in self._members.values() if record.counters is not None]
        # Summing runs on a thread, so that members receive their orders meanwhile.
        return await asyncio.to_thread(added, *self._memory.ended.all(), *living)
