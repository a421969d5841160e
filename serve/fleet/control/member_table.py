"""The members of a cluster: the record of each, calls to it, the leases, and the directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from fnmatch import fnmatchcase

from halfserve.protos import cluster_pb2
from halfserve.serve.fleet.control.autoscaling import LoadMeter
from halfserve.serve.fleet.control.reports import LEASE_S, NOTHING, REPORT_S, CallAnswer, ModelReport, Orders, Report
from halfserve.serve.fleet.control.wanted import Order

logger = logging.getLogger(__name__)

TICK_S = 0.1  # interval between two checks of the leases
STALL_S = 1.0  # a check this late means that the controller itself was stopped, so no lease expires
FREQUENT = 100  # members that may report every REPORT_S; above, each reports less often, as a report costs a Ray actor 1.7 ms
SELDOM = 4.0  # upper bound of the report interval, in multiples of REPORT_S
PUBLISH_S = 0.05  # shortest time between two directories
DIRECTORY_BYTES_S = 50e6  # limit on the directory traffic to all members; large clusters publish less often
HAND_OVER_S = 60.0  # time for other members to load the models of a leaving member


class MemberEndedError(Exception):
    """A member ended before it answered a call."""


class MemberRecord:
    """Controller's record of one member. Lives on the event loop.

    Attributes:
        report: its last report.
        reported_at: arrival time of the last report, in seconds of the controller's clock.
        joined_at: arrival time of the first report.
        served: names of the models that it serves.
        profile: the part of its report that other members and clients depend on; compared to detect changes.
        meter: measures the load of the member and of its models.
        drains_since: time, in seconds of the controller's clock, since which the member shall leave; None while it stays.
        leaves: whether it was told to leave, because other members serve its models or HAND_OVER_S are over.
        sent_directory: version of the directory that it was sent last.
    """

    def __init__(self, report: Report, now: float) -> None:
        self.report = report
        self.joined_at = self.reported_at = now
        self.served: frozenset[str] = frozenset()
        self.profile: object = None
        self.meter = LoadMeter()
        self.drains_since: float | None = None
        self.leaves = False
        self.sent_directory = 0
        self._calls: dict[str, tuple[str, Order, asyncio.Future[CallAnswer]]] = {}  # unanswered, by the order's id
        self._poll: asyncio.Future[bool] | None = None

    @property
    def id(self) -> str:
        return self.report.member

    @property
    def title(self) -> str:
        """Name of the member for messages."""
        return f"member {self.id} on {self.report.machine} ({self.report.grpc_address})"

    @property
    def is_leaving(self) -> bool:
        return self.drains_since is not None or self.report.is_draining

    @property
    def takes_requests(self) -> bool:
        """Whether clients may send it requests; a leaving member accepts them until other members serve its models."""
        return not self.report.is_draining and not self.leaves

    def model(self, name: str) -> ModelReport:
        """Last report of a model; NOTHING if the member did not report it."""
        return self.report.models.get(name, NOTHING)

    def may_have(self, name: str) -> bool:
        """Return whether a model of this name belongs to the member's group."""
        return any(fnmatchcase(name, pattern) for pattern in self.report.patterns)

    def take(self, report: Report, now: float) -> None:
        """Take in a new report."""
        self.report, self.reported_at = report, now
        self.served = frozenset(name for name, model in report.models.items() if model.is_served)
        self.profile = (report.grpc_address, report.http_address, report.is_draining, self.served)
        self.meter.take(report.models, report.compute_slots, now)
        for given, answer in report.answers.items():
            call = self._calls.pop(given, None)
            if call is not None and not call[2].done():
                call[2].set_result(answer)

    async def ask(self, target: str, order: Order, limit_s: float | None) -> CallAnswer:
        """Have the member carry out a call, and return its answer.

        Raises:
            MemberEndedError: the member ended before.
            TimeoutError: it did not answer within `limit_s` seconds.
        """
        answer: asyncio.Future[CallAnswer] = asyncio.get_running_loop().create_future()
        self._calls[order.id] = target, order, answer
        self.wake()
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        finally:
            self._calls.pop(order.id, None)

    def untaken_calls(self) -> list[tuple[str, Order]]:
        """Return the calls that its last report does not show as taken."""
        return [(target, order) for target, order, _ in self._calls.values() if order.id not in self.report.taken]

    def end(self) -> None:
        """End its calls and its wait, because it is a member no more."""
        for _, _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(MemberEndedError(self.title))
        self.wake(is_last=False)

    async def wait(self, limit_s: float) -> bool:
        """Wait until there are new orders for this member, at most `limit_s` seconds.

        Returns:
            Whether the report that began the wait is still the last one: a later report ends the wait.
        """
        self.wake(is_last=False)
        poll = self._poll = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                is_last: bool = await poll
        except TimeoutError:
            is_last = True
        finally:
            if self._poll is poll:
                self._poll = None
        return is_last

    def wake(self, *, is_last: bool = True) -> None:
        """End the wait."""
        poll, self._poll = self._poll, None
        if poll is not None and not poll.done():
            poll.set_result(is_last)

    def entry(self) -> cluster_pb2.Member:
        """Entry of this member in the directory."""
        states = cluster_pb2.Member.State
        return cluster_pb2.Member(
            id=self.id,
            grpc_address=self.report.grpc_address,
            http_address=self.report.http_address,
            state=states.SERVING if self.takes_requests else states.DRAINING,
            models=sorted(self.served),
        )


class MemberTable:
    """All members whose lease has not expired. Lives on the event loop.

    Attributes:
        members: records by member id, in the order of joining.
        version: version of the directory; 0 before the first.
        directory: serialized directory.
        is_complete: set once every living member had time to report, so that there are directories.
    """

    def __init__(self, controller: str, clock: Callable[[], float]) -> None:
        """Create a table without members, for the controller of this id; `clock` is in step with the event loop's time."""
        self.members: dict[str, MemberRecord] = {}
        self.version = 0
        self.directory = b""
        self.is_complete = asyncio.Event()
        self._controller = controller
        self._clock = clock
        self._complete_at = clock() + LEASE_S
        self._is_successor = False  # whether an earlier controller existed, as reports show
        self._is_stale = True
        self._publish_at = 0.0
        self._publishing: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._looking: asyncio.TimerHandle | None = None

    @property
    def report_s(self) -> float:
        """Longest time that the answer to a report may be delayed, in seconds; the member reports again afterwards."""
        return REPORT_S * min(max(1.0, len(self.members) / FREQUENT), SELDOM)

    @property
    def lease_s(self) -> float:
        """Time without a report after which a member is removed, in seconds; LEASE_S up to FREQUENT members."""
        return self.report_s * LEASE_S / REPORT_S

    async def exchange(self, report: Report) -> Orders:
        """Take in a report and answer with the member's orders: at once if they are news to it, else after `report_s`."""
        self._look_regularly()
        self._learn(report)
        if report.has_ended:
            self._end(report.member, "has left")
            return Orders(controller=self._controller)
        record = self._take(report)
        orders, is_news = self._orders(record)
        if report.controller == self._controller and not is_news:
            if not await record.wait(self.report_s):
                return orders
            orders, _ = self._orders(record)
        if orders.directory is not None:
            record.sent_directory = self.version
        return orders

    def drain(self, record: MemberRecord) -> None:
        """Have a member leave once other members serve its models."""
        record.drains_since = record.drains_since or self._clock()
        record.wake()

    def staying(self) -> list[MemberRecord]:
        """Members that are not about to leave."""
        return [one for one in self.members.values() if not one.is_leaving]

    def _learn(self, report: Report) -> None:
        """Learn from a report that there was an earlier controller, and the version of its directory."""
        if report.controller not in {"", self._controller} and not self._is_successor:
            self._is_successor, self._complete_at = True, max(self._complete_at, self._clock() + LEASE_S)
        if report.directory_version > self.version:
            self.version = report.directory_version
            self._changed()

    def _take(self, report: Report) -> MemberRecord:
        now = self._clock()
        record = self.members.get(report.member)
        if record is None:
            record = self.members[report.member] = MemberRecord(report, now)
            logger.info("%s has joined", record.title)
        before = record.profile
        record.take(report, now)
        if record.profile != before:
            self._changed()
        return record

    def _end(self, member: str, how: str) -> None:
        record = self.members.pop(member, None)
        if record is not None:
            logger.info("%s %s", record.title, how)
            record.end()
            self._changed()

    def _orders(self, record: MemberRecord) -> tuple[Orders, bool]:
        """Orders for a member now, and whether they contain anything not sent yet."""
        if not record.leaves and self._may_leave(record):
            record.leaves = True
            self._changed()
        is_behind = bool(self.directory) and record.report.directory_version != self.version
        calls, drain = record.untaken_calls(), record.leaves and not record.report.is_draining
        directory = self.directory if is_behind else None
        orders = Orders(controller=self._controller, directory=directory, calls=calls, drain=drain)
        return orders, bool(calls) or drain or (is_behind and self.version > record.sent_directory)

    def _may_leave(self, record: MemberRecord) -> bool:
        if record.drains_since is None:
            return False
        elsewhere = {name for one in self.members.values() if one.takes_requests and not one.is_leaving for name in one.served}
        return record.served <= elsewhere or self._clock() > record.drains_since + HAND_OVER_S

    def _changed(self) -> None:
        """Schedule a new directory."""
        self._is_stale = True
        if self._publishing is None and self.is_complete.is_set():
            after = max(0.0, self._publish_at - self._clock())
            self._publishing = asyncio.get_running_loop().call_later(after, self._publish)

    def _look_regularly(self) -> None:
        """Start checking the leases; goes on while there are members or the table is not complete yet."""
        if self._looking is None:
            self._looked_at = self._clock()
            self._looking = asyncio.get_running_loop().call_later(TICK_S, self._look)

    def _look(self) -> None:
        now = self._clock()
        late, self._looked_at = now - self._looked_at - TICK_S, now
        lease_s = self.lease_s
        self._looking = None
        if now >= self._complete_at and not self.is_complete.is_set():
            self.is_complete.set()
            self._changed()
        for record in list(self.members.values()):
            if late > STALL_S:
                record.reported_at = now
            elif now - record.reported_at > lease_s:
                self._end(record.id, f"has not reported for {lease_s:g} s, and is a member no more")
        if self.members or not self.is_complete.is_set():
            self._look_regularly()

    def _publish(self) -> None:
        self._publishing = None
        if not self._is_stale:
            return
        self._is_stale = False
        self.version += 1
        entries = [record.entry() for record in self.members.values()]
        self.directory = cluster_pb2.Directory(version=self.version, members=entries).SerializeToString()
        pause = max(PUBLISH_S, len(self.members) * len(self.directory) / DIRECTORY_BYTES_S)
        self._publish_at = self._clock() + pause
        for record in self.members.values():
            record.wake()
