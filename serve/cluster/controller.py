"""The controller of a cluster: knows the members by their reports, orders what they serve, and answers for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError, Message

from halfserve.protos import cluster_pb2
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.cluster.autoscaling import MemberLoad
from halfserve.serve.cluster.cluster_index import cluster_index, cluster_status
from halfserve.serve.cluster.cluster_memory import ClusterMemory
from halfserve.serve.cluster.ended_figures import added
from halfserve.serve.cluster.member_record import MemberRecord
from halfserve.serve.cluster.reports import LEASE_S, REPORT_S, ModelOrder, Orders, Report
from halfserve.serve.engine.errors import (
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from halfserve.serve.members.figures import Figures
from halfserve.serve.observability.metrics import CONTENT_TYPE, MetricTexts
from halfserve.serve.protocol.service import SERVICE

logger = logging.getLogger(__name__)

TICK_S = 0.1  # between two looks at leases
STALL_S = 1.0  # a look that is so late says that the controller stood still, and no member is to blame
PUBLISH_S = 0.05  # between two directories, at least
DIRECTORY_BYTES_S = 50e6  # of directories that all members are sent; large clusters have fewer, later ones
FIGURES_S = 5.0  # for the figures of all members; longer than a lease, so that none is waited for that has ended
UPLOAD_BYTES = 2**24  # of a model that a request brings along, as all agents keep it in memory
KEEPERS = 32  # agents that keep the memory: those that have been there longest
# How the status of a member's failure is raised again; all others become FailedPreconditionError.
RAISED: dict[str, Callable[[str], InferenceError]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "NOT_FOUND": NotFoundError,
    "UNAVAILABLE": UnavailableError,
    "UNIMPLEMENTED": UnsupportedError,
}


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """How a cluster is controlled.

    Attributes:
        models: to serve at the start; None for all of the repository.
        models_per_member: how many models a member serves; 0 for all.
    """

    models: tuple[str, ...] | None = None
    models_per_member: int = 0


class Controller:
    """Lives on one event loop; see `ControllerLink` for what agents ask of it."""

    def __init__(self, options: ControllerOptions | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """A controller that knows no member yet.

        Args:
            options: of the cluster.
            clock: seconds that only grow, in step with the event loop's time.
        """
        self.id = uuid.uuid4().hex
        self._options = options or ControllerOptions()
        self._clock = clock
        self._members: dict[str, MemberRecord] = {}
        self._memory = ClusterMemory()
        self._recovered_at: float | None = clock() + LEASE_S  # None: it has
        self._follows = False  # another controller, as reports show
        self._trials: dict[str, tuple[str, ModelOrder]] = {}  # by model: the member that decides, and what it shall load
        self._figures_number = 0
        self._directory = cluster_pb2.Directory()
        self._directory_bytes = b""
        self._publish_at = 0.0
        self._is_stale = True  # the directory
        self._publishing: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._looking: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            f"/{SERVICE}/RepositoryIndex": (pb.RepositoryIndexRequest, self._index),
            f"/{SERVICE}/RepositoryModelLoad": (pb.RepositoryModelLoadRequest, self._load_request),
            f"/{SERVICE}/RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self._unload_request),
            f"/{SERVICE}/ModelStatistics": (pb.ModelStatisticsRequest, self._statistics),
            f"/{SERVICE}/ModelReady": (pb.ModelReadyRequest, self._model_ready),
        }

    async def exchange(self, report: Report) -> Orders:
        """Take a member's report and answer with its orders: at once if they are news to it, else within REPORT_S.

        A later report of the same member ends the wait of an earlier one.
        """
        self._look_regularly()
        record = self._take(report)
        if record is None:
            if not report.has_ended:
                await asyncio.sleep(REPORT_S)
            return Orders(controller=self.id)
        orders = self._orders(record)
        if report.controller == self.id and not record.is_news(orders, self._directory.version):
            if not await record.wait(REPORT_S):
                return orders
            orders = self._orders(record)
        record.tell(orders, directory=self._directory.version, memory=self._memory.number)
        return orders

    async def call(self, path: str, request: bytes) -> bytes:
        """Answer a management RPC for the whole cluster.

        Args:
            path: of RepositoryIndex, RepositoryModelLoad, RepositoryModelUnload, ModelStatistics or ModelReady.
            request: serialized.

        Returns:
            The serialized answer.

        Raises:
            InferenceError: it cannot be done, and why.
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
        await self._until(lambda: self._recovered_at is None)
        return (await answer(message)).SerializeToString()

    async def metrics(self) -> tuple[bytes, str]:
        """The Prometheus metrics of all members together, and their content type.

        Raises:
            UnavailableError: a member did not answer in time.
        """
        await self._until(lambda: self._recovered_at is None)
        total = await self._figures()
        texts = MetricTexts()
        texts.add(total.metrics)
        return texts.joined(), CONTENT_TYPE

    def status(self) -> dict[str, Any]:
        """Members, machines and models with their loads, as plain values for tables and JSON."""
        members = list(self._members.values())
        return {
            "controller": self.id,
            "is_recovering": self._recovered_at is not None,
            "directory_version": self._directory.version,
            **cluster_status(members, self._memory.models or {}, self._shall_serve, self._clock()),
        }

    def loads(self) -> dict[str, MemberLoad]:
        """What each member that stays has done lately, by id: what autoscaling needs."""
        return {record.id: record.load() for record in self._members.values() if not record.is_leaving}

    def drain(self, member: str) -> None:
        """Have a member take no new requests, answer all that it has, and leave.

        Raises:
            NotFoundError: there is no such member.
        """
        record = self._members.get(member)
        if record is None:
            raise NotFoundError(f"the cluster has no member {member!r}; its status lists them")
        record.drains = True
        self._changed(record)

    async def reload(self, model: str | None = None) -> None:
        """Load a model, or all, again from the repository: at one member first, and if it succeeds at all others.

        Raises:
            NotFoundError: the model is not loaded.
            InferenceError: the first member refused it, and all serve what they did; or another one refused it then.
        """
        await self._until(lambda: self._recovered_at is None)
        loaded = self._memory.models or {}
        if model is not None and model not in loaded:
            raise _not_loaded(model)
        for name in list(loaded) if model is None else [model]:
            if name in loaded:  # still
                await self._finish(self._load(name, loaded[name].request))

    # What members report.

    def _take(self, report: Report) -> MemberRecord | None:
        """Learn what a report says; None for a member that has ended."""
        now = self._clock()
        self._learn(report, now)
        for member, figures in report.left.items():
            self._end(member, figures)
        if report.has_ended:
            self._end(report.member, report.figures)
            return None
        if self._memory.ended.has(report.member):  # a report that took longer than its successor
            return None
        record = self._members.get(report.member)
        before = None if record is None else record.entry()
        if record is None:
            record = self._members[report.member] = MemberRecord(report, now)
            if self._memory.ended.revive(report.member):
                self._memory.changed()
            logger.info("%s has joined", record.title)
        record.take(report, now)
        if self._memory.models is None and self._recovered_at is None and report.models:
            self._memory.begin(report.models if self._options.models is None else self._options.models)
            self._wake_all()
        if record.entry() != before:
            self._changed(record)
        self._tell_news()
        return record

    def _learn(self, report: Report, now: float) -> None:
        """Take over what other controllers have decided."""
        if self._recovered_at is not None:
            if report.controller and report.controller != self.id and not self._follows:
                self._follows, self._recovered_at = True, max(self._recovered_at, now + LEASE_S)
            if report.memory is not None:
                found = ClusterMemory.from_bytes(report.memory)
                if found.number > self._memory.number:
                    self._memory = found
        generations = (model.generation for model in report.models.values())
        self._memory.generation = max(self._memory.generation, *generations, 0)
        self._figures_number = max(self._figures_number, report.figures_number)
        if report.directory_version > self._directory.version:
            self._directory.version, self._is_stale = report.directory_version, True

    def _end(self, member: str, figures: bytes | None) -> None:
        """A member has ended; without figures, its last report counts until better ones come."""
        record = self._members.pop(member, None)
        estimated = record.last_figures() if figures is None and record is not None else figures
        if estimated is not None and self._memory.ended.end(member, estimated, exact=figures is not None):
            self._memory.changed()
        if record is not None:
            logger.info("%s has %s", record.title, "left" if figures is not None else "not reported in time")
            record.wake(is_last=False)
            self._changed()
            self._wake_all()

    def _look_regularly(self) -> None:
        if self._looking is None:
            self._looked_at = self._clock()
            self._looking = asyncio.get_running_loop().call_later(TICK_S, self._look)

    def _look(self) -> None:
        """End what has not reported for a lease; as long as there are members, look again."""
        now = self._clock()
        late, self._looked_at = now - self._looked_at - TICK_S, now
        self._looking = None
        if self._recovered_at is not None and now >= self._recovered_at:
            self._recover()
        for record in list(self._members.values()):
            if late > STALL_S:
                record.reported_at = now
            elif now - record.reported_at > LEASE_S:
                self._end(record.id, None)
        if self._members or self._recovered_at is not None:
            self._look_regularly()

    def _recover(self) -> None:
        """All that can still report has; from here on this controller decides."""
        self._recovered_at = None
        if self._memory.models is None:
            offered = {name for record in self._members.values() for name in record.report.models}
            if offered:
                self._memory.begin(offered if self._options.models is None else self._options.models)
        for record in self._members.values():
            self._memory.ended.revive(record.id)
        self._changed()
        self._wake_all()

    # What members are told.

    def _orders(self, record: MemberRecord) -> Orders:
        if self._recovered_at is not None:
            kept = {
                name: ModelOrder(generation=model.generation, request=b"")
                for name, model in record.report.models.items()
                if model.is_served or model.generation
            }
            return Orders(controller=self.id, models=kept)
        memory, version = self._memory, self._directory.version
        keeps = record.given.memory != memory.number and record.id in self._keepers()
        return Orders(
            controller=self.id,
            models={name: self._order(record, name) for name in self._names(record)},
            directory=self._directory_bytes if version and record.report.directory_version != version else None,
            figures_number=self._figures_number,
            drain=record.drains,
            memory=memory.to_bytes() if keeps else None,
        )

    def _names(self, record: MemberRecord) -> Iterable[str]:
        """The models that a member shall serve now."""
        for name in self._memory.models or {}:
            if self._shall_serve(record, name):
                yield name
        for name, (member, _) in self._trials.items():
            if member == record.id and name not in (self._memory.models or {}):
                yield name

    def _order(self, record: MemberRecord, name: str) -> ModelOrder:
        member, trial = self._trials.get(name, ("", None))
        reported = record.model(name)
        order = trial if trial is not None and member == record.id else (self._memory.models or {})[name]
        if reported.generation == order.generation:
            return ModelOrder(generation=order.generation, request=b"")
        if reported.generation > order.generation and reported.error and reported.is_served:
            # What it was the first to try failed; it serves what it did before.
            return ModelOrder(generation=reported.generation, request=b"")
        return order

    def _keepers(self) -> Iterable[str]:
        if len(self._members) <= KEEPERS:
            return self._members
        return [member for member, _ in zip(self._members, range(KEEPERS), strict=False)]  # in the order they have joined

    def _shall_serve(self, record: MemberRecord, name: str) -> bool:  # noqa: ARG002  (until models are placed)
        return True

    def _changed(self, record: MemberRecord | None = None) -> None:
        """The directory is not the present one any more, and there may be new orders for a member."""
        self._is_stale = True
        if record is not None:
            record.wake()
        self._tell_news()
        if self._publishing is None and self._recovered_at is None:
            after = max(0.0, self._publish_at - self._clock())
            self._publishing = asyncio.get_running_loop().call_later(after, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        if not self._is_stale:
            return
        self._is_stale = False
        version = self._directory.version + 1
        self._directory = cluster_pb2.Directory(version=version, members=[one.entry() for one in self._members.values()])
        self._directory_bytes = self._directory.SerializeToString()
        pause = max(PUBLISH_S, len(self._members) * len(self._directory_bytes) / DIRECTORY_BYTES_S)
        self._publish_at = self._clock() + pause
        self._wake_all()

    def _wake_all(self) -> None:
        for record in self._members.values():
            record.wake()
        self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news.clear()

    async def _until(self, holds: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until something holds that reports may change. Returns whether it does."""
        ends = None if limit_s is None else self._clock() + limit_s
        self._look_regularly()
        while not holds():
            left = REPORT_S if ends is None else min(REPORT_S, ends - self._clock())
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
        return True

    # What the cluster answers.

    async def _load_request(self, request: pb.RepositoryModelLoadRequest) -> Message:
        data = request.SerializeToString()
        if len(data) > UPLOAD_BYTES:
            raise InvalidArgumentError(
                f"the request brings {len(data)} bytes of a model along, expected at most {UPLOAD_BYTES}, as every machine "
                "keeps them in memory; put the model into the repository"
            )
        await self._finish(self._load(request.model_name, data))
        return pb.RepositoryModelLoadResponse()

    async def _unload_request(self, request: pb.RepositoryModelUnloadRequest) -> Message:
        for name in request.parameters:
            if name != "unload_dependents":
                raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'unload_dependents'")
        if request.model_name not in (self._memory.models or {}):
            raise _not_loaded(request.model_name)
        await self._finish(self._unload(request.model_name))
        return pb.RepositoryModelUnloadResponse()

    async def _index(self, request: pb.RepositoryIndexRequest) -> Message:
        return cluster_index(
            list(self._members.values()), self._memory.models or {}, self._shall_serve, ready_only=request.ready
        )

    async def _model_ready(self, request: pb.ModelReadyRequest) -> Message:
        models = [one.model(request.name) for one in self._members.values() if not one.is_leaving]
        ready = any(one.is_served and (not request.version or request.version in one.versions) for one in models)
        return pb.ModelReadyResponse(ready=ready)

    async def _statistics(self, request: pb.ModelStatisticsRequest) -> Message:
        answer = (await self._figures()).statistics
        if not request.name:
            return answer
        found = [one for one in answer.model_stats if one.name == request.name and request.version in {"", one.version}]
        if not found:
            what = f"model {request.name!r}" + (f" version {request.version!r}" if request.version else "")
            raise NotFoundError(f"{what} is not served; RepositoryIndex lists what is")
        return pb.ModelStatisticsResponse(model_stats=found)

    async def _figures(self) -> Figures:
        """The sum of all members, as of after the call.

        Raises:
            UnavailableError: a member did not answer in time.
        """
        self._figures_number += 1
        number = self._figures_number
        asked = set(self._members)
        self._wake_all()

        def missing() -> list[MemberRecord]:
            return [one for one in self._members.values() if one.id in asked and one.figures_number < number]

        if not await self._until(lambda: not missing(), FIGURES_S):
            raise UnavailableError(
                f"{missing()[0].title} has not reported its figures within {FIGURES_S:g} s; ask again in a moment",
                retry_after_s=1.0,
            )
        living = [record.figures for record in self._members.values() if record.figures is not None]
        # On a thread, as members wait for their orders meanwhile.
        return await asyncio.to_thread(added, *self._memory.ended.all(), *living)

    # What changes what it serves. What was begun is finished even if the client goes.

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, request: bytes) -> None:
        async with self._lock(name):
            order = self._memory.order(name, request)
            await self._try(name, order)
            self._memory.models = {**(self._memory.models or {}), name: order}
            self._memory.changed()
            self._wake_all()

            def waits() -> list[MemberRecord]:
                return [one for one in self._servers(name) if one.model(name).generation < order.generation]

            def refused() -> list[MemberRecord]:
                return [one for one in self._servers(name) if _has_failed(one, name, order)]

            await self._until(lambda: bool(refused()) or not waits())
            if refused():
                first = refused()[0]
                raise FailedPreconditionError(f"{first.title} refused what others have done: {first.model(name).error}")

    async def _try(self, name: str, order: ModelOrder) -> None:
        """Have one member carry out an order, which is one for all then.

        Raises:
            InferenceError: it refused.
            UnavailableError: there is no member.
        """
        try:
            while (first := await self._decided(name, order)) is None:
                logger.info("another member decides on %s, as the first one is gone", name)
        finally:
            self._trials.pop(name, None)
            self._wake_all()
        if _has_failed(first, name, order):
            failed = first.model(name)
            raise RAISED.get(failed.status, FailedPreconditionError)(failed.error)

    async def _decided(self, name: str, order: ModelOrder) -> MemberRecord | None:
        """The member that has carried out an order, or refused it; None if it has ended before."""
        first = next(iter(self._servers(name)), None)
        if first is None:
            raise UnavailableError("the cluster has no member now; wait until one has started")
        self._trials[name] = first.id, order
        first.wake()
        await self._until(lambda: first.id not in self._members or first.model(name).generation >= order.generation)
        return first if first.id in self._members else None

    async def _unload(self, name: str) -> None:
        async with self._lock(name):
            models = self._memory.models or {}
            if name not in models:
                raise _not_loaded(name)
            self._memory.models = {one: order for one, order in models.items() if one != name}
            self._memory.changed()
            self._wake_all()
            await self._until(lambda: not any(one.serves(name) for one in self._members.values() if not one.is_leaving))

    def _servers(self, name: str) -> list[MemberRecord]:
        """The members that shall serve a model: those that do first, then in the order they have joined."""
        found = [one for one in self._members.values() if not one.is_leaving and self._shall_serve(one, name)]
        return sorted(found, key=lambda one: not one.serves(name))

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _has_failed(record: MemberRecord, name: str, order: ModelOrder) -> bool:
    model = record.model(name)
    return model.generation == order.generation and bool(model.error)


def _not_loaded(name: str) -> NotFoundError:
    return NotFoundError(f"model {name!r} is not loaded; RepositoryIndex lists what is")
