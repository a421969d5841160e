"""All waiting requests of a model: a line for each bucket, and the bounds of their number and bytes. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final

from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.queueing.waiting_line import WaitingLine
from halfserve.serve.engine.requests import InferRequest

_NO_BUCKET: Final = object()


class FullError(Exception):
    """The queue, or one priority in it, has reached its bound; the text gives the bound."""


class WaitingRequests:
    """The waiting requests of one model.

    Attributes:
        count: number of waiting requests.
        lines: waiting requests by their bucket. A line that was the only one when its last request left is kept for the next
            request.
    """

    __slots__ = (
        "_by_level", "_bytes", "_count_levels", "_flushes", "_latest", "_limits", "_max_bytes", "_max_waiting", "count",
        "lines",
    )  # fmt: skip

    def __init__(self, limits: BatchLimits, *, flushes: bool) -> None:
        """`flushes`: whether a request of another shape ends the delay of the others, as in Triton."""
        self.lines: dict[Hashable, WaitingLine] = {}
        self.count = 0
        self._limits = limits
        self._max_waiting, self._max_bytes = limits.max_waiting, limits.max_waiting_bytes
        self._flushes = flushes
        self._bytes = 0
        self._count_levels = limits.levels > 1
        self._by_level: dict[int, int] = {}  # number of waiting requests
        self._latest = WaitingLine(_NO_BUCKET)  # line of the latest request

    def add(self, request: InferRequest) -> None:
        """Add a request that has just arrived.

        Raises:
            FullError: a bound is reached; the request was not taken.
        """
        if self.count >= self._max_waiting:
            raise FullError(f"{self._max_waiting} requests wait")
        held = self._bytes + request.size
        if held > self._max_bytes and self.count:  # a single request is limited by the transport
            raise FullError(f"requests of {self._bytes / 2**20:.0f} MiB wait, of at most {self._max_bytes / 2**20:.0f} MiB")
        if self._count_levels:
            self._enter_level(request.priority)
        line = self._latest
        if request.bucket is not line.bucket:
            line = self._line_of(request.bucket)
        line.add(request)
        self.count += 1
        self._bytes = held

    def remove(self, request: InferRequest) -> bool:
        """Remove a cancelled request; False if it is no longer here."""
        line = self.lines.get(request.bucket)
        if line is None or not line.remove(request):
            return False
        self.left([request])
        self.drop_empty(line)
        return True

    def take_late(self, now: float) -> list[InferRequest]:
        """Remove every request whose time has run out, to make room."""
        late: list[InferRequest] = []
        for line in list(self.lines.values()):
            if (soonest := line.soonest) is not None and soonest <= now:
                late += line.take_late(now)
                self.drop_empty(line)
        self.left(late)
        return late

    def left(self, *left: list[InferRequest]) -> None:
        """Count requests that were taken from their lines."""
        for requests in left:
            self.count -= len(requests)
            for request in requests:
                self._bytes -= request.size
                if self._count_levels:
                    self._leave_level(request.priority)

    def drop_empty(self, line: WaitingLine) -> None:
        """Drop a line without requests, unless it is the only one."""
        if not line.rows and len(self.lines) > 1:
            del self.lines[line.bucket]
            if self._latest is line:
                self._latest = WaitingLine(_NO_BUCKET)

    def filled(self) -> Iterator[WaitingLine]:
        """Return the lines that hold requests."""
        return (line for line in self.lines.values() if line.rows)

    def count_before(self, level: int) -> int:
        """Return the number of waiting requests that are as urgent as `level`, or more."""
        return sum([count for other, count in self._by_level.items() if other <= level]) if self._count_levels else self.count

    def rows_of(self, bucket: Hashable) -> int:
        """Return the number of waiting rows of a bucket."""
        line = self.lines.get(bucket)
        return 0 if line is None else line.rows

    def _line_of(self, bucket: Hashable) -> WaitingLine:
        line = self.lines.get(bucket)
        if line is None:
            if not self.count:
                self.lines.clear()
            line = self.lines[bucket] = WaitingLine(bucket)
        if self._flushes and line is not self._latest:
            # As in Triton, another shape ends the delay of the waiting requests. Free copies compute them at once.
            for other in self.lines.values():
                other.is_due = other is not line and other.rows > 0
        self._latest = line
        return line

    def _enter_level(self, level: int) -> None:
        limits, waiting = self._limits, self._by_level.get(level, 0)
        bound = limits.max_waiting_by_level.get(level, limits.max_waiting_of_others)
        if bound is not None and waiting >= bound:
            raise FullError(f"{bound} requests of priority {level + 1} wait")  # clients count priorities from 1
        self._by_level[level] = waiting + 1

    def _leave_level(self, level: int) -> None:
        self._by_level[level] -= 1
        if not self._by_level[level]:
            del self._by_level[level]  # there may be as many levels as requests
