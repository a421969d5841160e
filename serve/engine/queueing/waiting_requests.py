"""The waiting requests of a model: a line for each bucket, in the order in which they leave, and the bounds of all. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Final

from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest

MANY_LEVELS: Final = 16  # number of priorities before empty ones are dropped
# Cancelled requests are swept out of a line once there are this many and they outnumber the waiting ones.
MANY_GONE: Final = 64
_NO_BUCKET: Final = object()


class WaitingLine:
    """The waiting requests of one bucket: two lines per priority in use, the second for requests past their patience.

    A cancelled request leaves in constant time: it is only marked, and skipped in its turn.

    Attributes:
        bucket: bucket of all requests in the line.
        rows: total rows of all waiting requests.
        soonest_deadline: a lower bound of the deadlines in the line, in seconds; None if no request had one since the line was
            last empty.
        soonest_leave_by: a lower bound of the requests' `leave_by`, in seconds; None like `soonest_deadline`.
        is_due: whether its requests wait no longer for more of them; True until the line is empty.
    """

    __slots__ = ("_gone", "_levels", "_lines", "bucket", "is_due", "rows", "soonest_deadline", "soonest_leave_by")

    def __init__(self, bucket: Hashable) -> None:
        self.bucket = bucket
        self.rows = 0
        self.is_due = False
        self.soonest_deadline: float | None = None
        self.soonest_leave_by: float | None = None
        self._levels = [0]  # in rising order
        self._lines: list[deque[InferRequest]] = [deque(), deque()]  # two lines for each of these levels
        self._gone = 0

    def urgency(self, now: float) -> tuple[int, int]:
        """Return the rank, by level and arrival, of the next request at `now` (seconds): the line with the smallest pair is
        first.

        The line must not be empty. Requests past their patience are moved to the second line of their level.
        """
        for index, line in enumerate(self._lines):
            while line:
                request = line[0]
                if request.line is not self:
                    line.popleft()
                    self._gone -= 1
                elif not index % 2 and request.patience is not None and request.patience <= now:
                    self._lines[index + 1].append(line.popleft())
                else:
                    return 2 * self._levels[index // 2] + index % 2, request.arrived_ns
        raise LookupError("the line is empty")

    @property
    def first_arrival(self) -> float:
        """Arrival time of the oldest request, in seconds. The line must not be empty."""
        if len(self._lines) == 2 and not self._lines[1]:
            return self._head(self._lines[0]).arrived_ns / 1e9
        return min(self._head(line).arrived_ns for line in self._lines if self._cleared(line)) / 1e9

    def __iter__(self) -> Iterator[InferRequest]:
        """Iterate over the waiting requests, in no particular order."""
        return (request for line in self._lines for request in line if request.line is self)

    def add(self, request: InferRequest) -> None:
        level = request.priority
        (self._lines[0] if self._levels[0] == level else self._lines_of(level)).append(request)
        self.rows += request.rows
        request.line = self
        deadline, leave_by = request.deadline, request.leave_by
        if deadline is not None and (self.soonest_deadline is None or deadline < self.soonest_deadline):
            self.soonest_deadline = deadline
        if leave_by is not None and (self.soonest_leave_by is None or leave_by < self.soonest_leave_by):
            self.soonest_leave_by = leave_by

    def _lines_of(self, level: int) -> deque[InferRequest]:
        """Return the first line of a priority."""
        place = bisect_left(self._levels, level)
        if place < len(self._levels) and self._levels[place] == level:
            return self._lines[2 * place]
        if len(self._levels) >= MANY_LEVELS:
            self._drop_empty_levels()
            place = bisect_left(self._levels, level)
        self._levels.insert(place, level)
        self._lines[2 * place : 2 * place] = [deque(), deque()]
        return self._lines[2 * place]

    def _drop_empty_levels(self) -> None:
        used = [place for place in range(len(self._levels)) if self._lines[2 * place] or self._lines[2 * place + 1]]
        self._levels = [self._levels[place] for place in used]
        self._lines = [line for place in used for line in self._lines[2 * place : 2 * place + 2]]

    def remove(self, request: InferRequest) -> bool:
        """Remove a request; False if it is not in this line."""
        if request.line is not self:
            return False
        request.line = None
        self.rows -= request.rows
        self._gone += 1
        if not self.rows:
            self._clear()
        elif self._gone > MANY_GONE and self._gone > sum(map(len, self._lines)) // 2:
            self._sweep()
        return True

    def take(self, now: float, most_rows: int, finish: float) -> tuple[list[InferRequest], list[InferRequest], int]:
        """Remove the requests of the next batch. Requests past their patience are moved to the second line of their level.

        Args:
            now: present time in seconds; requests with an earlier `leave_by` are late.
            most_rows: most rows in one batch; the first request is taken even if it has more.
            finish: earliest end of the batch, in seconds; requests with an earlier deadline are late.

        Returns:
            The requests of the batch, the late ones, and the total rows of the batch.
        """
        taken: list[InferRequest] = []
        late: list[InferRequest] = []
        rows = 0
        bounded = self.soonest_deadline is not None or self.soonest_leave_by is not None
        for index, line in enumerate(self._lines):
            while line:
                request = line[0]
                if request.line is not self:
                    line.popleft()
                    self._gone -= 1
                elif not index % 2 and request.patience is not None and request.patience <= now:
                    self._lines[index + 1].append(line.popleft())
                elif rows and rows + request.rows > most_rows:
                    return self._left(taken, late, rows)
                else:
                    line.popleft()
                    request.line = None
                    if bounded and is_late(request, now, finish):
                        self.rows -= request.rows
                        late.append(request)
                    else:
                        taken.append(request)
                        rows += request.rows
        return self._left(taken, late, rows)

    @property
    def soonest(self) -> float | None:
        """The earlier of `soonest_deadline` and `soonest_leave_by`."""
        return _earliest(self.soonest_deadline, self.soonest_leave_by)

    def take_late(self, now: float) -> list[InferRequest]:
        """Remove all requests whose time has run out by `now`, in seconds."""
        late = [request for request in self if is_late(request, now, now)]
        for request in late:
            self.remove(request)
        self.soonest_deadline = _earliest(*(request.deadline for request in self))
        self.soonest_leave_by = _earliest(*(request.leave_by for request in self))
        return late

    def _left(
        self, taken: list[InferRequest], late: list[InferRequest], rows: int
    ) -> tuple[list[InferRequest], list[InferRequest], int]:
        self.rows -= rows
        if not self.rows:
            self._clear()
        return taken, late, rows

    def _head(self, line: deque[InferRequest]) -> InferRequest:
        self._cleared(line)
        return line[0]

    def _cleared(self, line: deque[InferRequest]) -> bool:
        """Drop cancelled requests from the front; returns whether a request waits."""
        while line and line[0].line is not self:
            line.popleft()
            self._gone -= 1
        return bool(line)

    def _clear(self) -> None:
        if len(self._levels) > MANY_LEVELS:
            self._levels, self._lines = [0], [deque(), deque()]
        for line in self._lines:
            line.clear()
        self._gone = 0
        self.is_due = False
        self.soonest_deadline = self.soonest_leave_by = None

    def _sweep(self) -> None:
        for line in self._lines:
            here = [request for request in line if request.line is self]
            line.clear()
            line.extend(here)
        self._gone = 0


def is_late(request: InferRequest, now: float, finish: float) -> bool:
    """Return whether a request that leaves its line at `now` is too late for a batch that ends at `finish`, in seconds."""
    deadline, leave_by = request.deadline, request.leave_by
    return (leave_by is not None and leave_by <= now) or (deadline is not None and deadline <= finish)


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)


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

    @property
    def soonest(self) -> float | None:
        """A lower bound of the times at which requests become late, in seconds; None if no request can."""
        return _earliest(*[line.soonest for line in self.lines.values()])

    def take_late(self, now: float) -> list[InferRequest]:
        """Remove every request whose time has run out."""
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
