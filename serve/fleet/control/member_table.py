"""The members of a cluster: the record of each, their leases, the directory, and callers that wait for changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from halfserve.protos import cluster_pb2
from halfserve.serve.fleet.control.autoscaling import LoadMeter
from halfserve.serve.fleet.control.cluster_memory import estimate
from halfserve.serve.fleet.control.reports import LEASE_S, NOTHING, REPORT_S, ModelReport, Orders, Report

logger = logging.getLogger(__name__)

TICK_S = 0.1  # interval between two checks of the leases
STALL_S = 1.0  # a check this late means that the controller itself was stopped, so no lease expires
FREQUENT = 100  # members that may report every REPORT_S; above, each reports less often, as a report costs a Ray actor 1.7 ms
SELDOM = 4.0  # upper bound of the report interval, in multiples of REPORT_S
PUBLISH_S = 0.05  # shortest time between two directories
DIRECTORY_BYTES_S = 50e6  # limit on the directory traffic to all members; large clusters publish less often


class MemberRecord:
    """Controller's record of one member. Lives on the event loop.

    Attributes:
        report: its last report.
        reported_at: arrival time of the last report, in seconds of the controller's clock.
        joined_at: arrival time of the first report.
        counters: the last counters received; None before.
        counters_number: the `Orders.counters_number` that those counters answer.
        served: names of the models that it serves.
        failed: names of the models whose last order failed.
        published: names of the models that the last directory lists for it.
        profile: the part of its report that other members and clients depend on; compared to detect changes.
        meter: measures the load of the member and of its models.
        drains: whether the member was asked to leave.
        hands_over_until: time, in seconds of the controller's clock, until which the member keeps answering unless other
            members serve its models earlier; None while it is not leaving, and once it may leave.
        sent: orders that it was sent last, but for the directory and the memory.
        sent_directory, sent_memory: versions of the directory and of the memory that it was sent last.
    """

    def __init__(self, report: Report, now: float) -> None:
        self.report = report
        self.joined_at = self.reported_at = now
        self.counters: bytes | None = None
        self.counters_number = 0
        self.served: frozenset[str] = frozenset()
        self.failed: frozenset[str] = frozenset()
        self.published: frozenset[str] = frozenset()
        self.profile: object = None
        self.meter = LoadMeter()
        self.drains = False
        self.hands_over_until: float | None = None
        self.sent = Orders(controller="")
        self.sent_directory = self.sent_memory = 0
        self._counters_models: Mapping[str, ModelReport] = {}
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
        return self.drains or self.report.is_draining

    @property
    def takes_requests(self) -> bool:
        """Whether clients may send it requests; a leaving member accepts them until other members serve its models."""
        return not self.report.is_draining and (not self.drains or self.hands_over_until is not None)

    def model(self, name: str) -> ModelReport:
        """Last report of a model; NOTHING if the member did not report it."""
        return self.report.models.get(name, NOTHING)

    def serves(self, name: str) -> bool:
        return name in self.served

    def take(self, report: Report, now: float) -> None:
        """Take in a new report."""
        self.report, self.reported_at = report, now
        self.served = frozenset(name for name, model in report.models.items() if model.is_served)
        self.failed = frozenset(name for name, model in report.models.items() if model.error)
        self.profile = (report.grpc_address, report.http_address, report.is_draining, self.served, self.failed)
        self.meter.take(report.models, report.compute_slots, now)
        if report.counters is not None and report.counters_number >= self.counters_number:
            self.counters, self.counters_number, self._counters_models = report.counters, report.counters_number, report.models

    def last_counters(self) -> bytes:
        """Counters estimated from its last report, for a member that ended without reporting its counters."""
        return estimate(self.counters, self._counters_models, self.report.models)

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

    def is_news(self, orders: Orders, directory: int) -> bool:
        """Whether orders contain anything not sent yet; `directory` is the version of the current directory."""
        return (
            _generations(orders) != _generations(self.sent)
            or (orders.directory is not None and directory > self.sent_directory)
            or orders.counters_number > self.sent.counters_number
            or orders.settings is not None
            or orders.memory is not None
            or orders.drain != self.sent.drain
        )

    def tell(self, orders: Orders, *, directory: int, memory: int) -> None:
        """Record the orders as sent."""
        self.sent = replace(orders, directory=None, memory=None)
        self.sent_directory, self.sent_memory = directory, memory


def _generations(orders: Orders) -> dict[str, int]:
    return {name: order.generation for name, order in orders.models.items()}


class MemberTable:
    """All members whose lease has not expired. Lives on the event loop.

    Attributes:
        members: records by member id, in the order of joining.
        version: version of the directory; 0 before the first.
        directory: serialized directory.
        clock: monotonic time in seconds.
        is_public: whether directories may be published yet.
    """

    def __init__(self, clock: Callable[[], float], look: Callable[[float], None], lost: Callable[[MemberRecord], None]) -> None:
        """Create a table without members.

        Args:
            clock: monotonic time in seconds, in step with the event loop's time.
            look: called every TICK_S with the time.
            lost: called with a member that was removed because its lease expired.
        """
        self.members: dict[str, MemberRecord] = {}
        self.version = 0
        self.directory = b""
        self.is_public = False
        self.clock = clock
        self._look_outside = look
        self._lost = lost
        self._is_stale = True
        self._publish_at = 0.0
        self._publishing: asyncio.TimerHandle | None = None
        self._looked_at = 0.0
        self._looking: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def report_s(self) -> float:
        """Longest time that the answer to a report may be delayed, in seconds; the member reports again afterwards."""
        return REPORT_S * min(max(1.0, len(self.members) / FREQUENT), SELDOM)

    @property
    def lease_s(self) -> float:
        """Time without a report after which a member is removed, in seconds; LEASE_S up to FREQUENT members."""
        return self.report_s * LEASE_S / REPORT_S

    def take(self, report: Report) -> tuple[MemberRecord, bool]:
        """Take in a report. Returns the member, and whether anything that other members depend on has changed."""
        now = self.clock()
        record = self.members.get(report.member)
        before = None if record is None else record.profile
        if record is None:
            record = self.members[report.member] = MemberRecord(report, now)
            logger.info("%s has joined", record.title)
        record.take(report, now)
        if record.profile != before:
            self.changed(record)
        self.tell_news()
        return record, record.profile != before

    def end(self, member: str) -> None:
        """Remove a member."""
        record = self.members.pop(member, None)
        if record is not None:
            record.wake(is_last=False)
            self.changed()

    def learn_version(self, version: int) -> None:
        """Number later directories above `version`, which another controller has published."""
        if version > self.version:
            self.version = version
            self._is_stale = True
            self.changed()

    def changed(self, record: MemberRecord | None = None) -> None:
        """Schedule a new directory, and wake the member if there may be new orders for it."""
        self._is_stale = True
        if record is not None:
            record.wake()
        self.tell_news()
        if self._publishing is None and self.is_public:
            after = max(0.0, self._publish_at - self.clock())
            self._publishing = asyncio.get_running_loop().call_later(after, self._publish)

    def wake_all(self) -> None:
        """Wake all members, because there may be new orders for them."""
        for record in self.members.values():
            record.wake()
        self.tell_news()

    def tell_news(self) -> None:
        """Have all waiting `until` calls check their conditions."""
        self._news.set()
        self._news.clear()

    async def until(self, holds: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until reports make a condition true, at most `limit_s` seconds. Returns whether it is true."""
        ends = None if limit_s is None else self.clock() + limit_s
        self.look_regularly()
        while not holds():
            left = REPORT_S if ends is None else min(REPORT_S, ends - self.clock())
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
        return True

    def look_regularly(self) -> None:
        """Start checking the leases; goes on while there are members or directories are not published yet."""
        if self._looking is None:
            self._looked_at = self.clock()
            self._looking = asyncio.get_running_loop().call_later(TICK_S, self._look)

    def _look(self) -> None:
        now = self.clock()
        late, self._looked_at = now - self._looked_at - TICK_S, now
        lease_s = self.lease_s
        self._looking = None
        self._look_outside(now)
        for record in list(self.members.values()):
            if late > STALL_S:
                record.reported_at = now
            elif now - record.reported_at > lease_s:
                logger.warning("%s has not reported for %g s, and is a member no more", record.title, lease_s)
                self.end(record.id)
                self._lost(record)
        if self.members or not self.is_public:
            self.look_regularly()

    def _publish(self) -> None:
        self._publishing = None
        if not self._is_stale:
            return
        self._is_stale = False
        self.version += 1
        entries = [record.entry() for record in self.members.values()]
        for record in self.members.values():
            record.published = record.served
        self.directory = cluster_pb2.Directory(version=self.version, members=entries).SerializeToString()
        pause = max(PUBLISH_S, len(self.members) * len(self.directory) / DIRECTORY_BYTES_S)
        self._publish_at = self.clock() + pause
        self.wake_all()
