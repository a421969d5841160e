"""The members of a cluster: their leases, the directory, and callers that wait for changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from halfserve.protos import cluster_pb2
from halfserve.serve.fleet.control.member_record import MemberRecord
from halfserve.serve.fleet.control.reports import LEASE_S, REPORT_S, Report

logger = logging.getLogger(__name__)

TICK_S = 0.1  # interval between two checks of the leases
STALL_S = 1.0  # a check this late means that the controller itself was stopped, so no lease expires
FREQUENT = 100  # members that may report every REPORT_S; above, each reports less often, as a report costs a Ray actor 1.7 ms
SELDOM = 4.0  # upper bound of the report interval, in multiples of REPORT_S
PUBLISH_S = 0.05  # shortest time between two directories
DIRECTORY_BYTES_S = 50e6  # limit on the directory traffic to all members; large clusters publish less often


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
