"""The batching policy: which waiting requests run together, and when. Pure: no clock, no thread, no event loop.

Each bucket (requests that can be concatenated) has its own line, so that mixed shapes do not split each other's batches.
The most common case costs least: one priority and one bucket at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator
from typing import Final

from halfserve.serve.engine.queueing.batch_growth import BatchGrowth
from halfserve.serve.engine.queueing.pace import BatchLimits, Pace
from halfserve.serve.engine.requests import InferRequest

# Cancelled requests are swept out of a line once there are this many and they outnumber the waiting ones.
MANY_GONE: Final = 64
_NO_BUCKET: Final = object()


class WaitingLine:
    """The waiting requests of one bucket: two lines per priority, the second for requests past their patience.

    A cancelled request leaves in constant time: it is only marked, and skipped when its turn comes.

    Attributes:
        bucket: of all requests in the line.
        rows: of all waiting requests.
        soonest_deadline: a lower bound of the deadlines in the line, in seconds; None where no request had one since the line
            was last empty.
        soonest_leave_by: likewise for `leave_by`.
    """

    __slots__ = ("_gone", "_lines", "bucket", "rows", "soonest_deadline", "soonest_leave_by")

    def __init__(self, bucket: Hashable, levels: int) -> None:
        self.bucket = bucket
        self.rows = 0
        self.soonest_deadline: float | None = None
        self.soonest_leave_by: float | None = None
        self._lines: tuple[deque[InferRequest], ...] = tuple(deque() for _ in range(2 * levels))
        self._gone = 0

    def urgency(self, now: float) -> tuple[int, int]:
        """Level and arrival of the next request at `now`, in seconds: the smaller pair goes first. The line must not be empty.

        Moves requests past their patience to the second line of their level.
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
                    return index, request.arrived_ns
        raise LookupError("the line is empty")

    @property
    def first_arrival(self) -> float:
        """Arrival of the oldest request, in seconds. The line must not be empty."""
        if len(self._lines) == 2 and not self._lines[1]:
            return self._head(self._lines[0]).arrived_ns / 1e9
        return min(self._head(line).arrived_ns for line in self._lines if self._cleared(line)) / 1e9

    def __iter__(self) -> Iterator[InferRequest]:
        """The waiting requests, in no particular order."""
        return (request for line in self._lines for request in line if request.line is self)

    def add(self, request: InferRequest) -> None:
        self._lines[2 * request.priority].append(request)
        self.rows += request.rows
        request.line = self
        deadline, leave_by = request.deadline, request.leave_by
        if deadline is not None and (self.soonest_deadline is None or deadline < self.soonest_deadline):
            self.soonest_deadline = deadline
        if leave_by is not None and (self.soonest_leave_by is None or leave_by < self.soonest_leave_by):
            self.soonest_leave_by = leave_by

    def remove(self, request: InferRequest) -> bool:
        """Take a request out; False when it is not in this line."""
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
        """Take out the requests of the next batch. Moves requests past their patience to the second line of their level.

        Args:
            now: in seconds; requests with an earlier `leave_by` are late.
            most_rows: in one batch; the first request goes even if it alone has more.
            finish: the soonest that the batch could end, in seconds; requests with an earlier deadline are late.

        Returns:
            The requests of the batch, the late ones, and the rows of the former.
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
        """Take out all requests whose time has run out by `now`, in seconds."""
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
        while line[0].line is not self:
            line.popleft()
            self._gone -= 1
        return line[0]

    def _cleared(self, line: deque[InferRequest]) -> bool:
        """Drop cancelled requests from the front; whether a request waits."""
        while line and line[0].line is not self:
            line.popleft()
            self._gone -= 1
        return bool(line)

    def _clear(self) -> None:
        for line in self._lines:
            line.clear()
        self._gone = 0
        self.soonest_deadline = self.soonest_leave_by = None

    def _sweep(self) -> None:
        for line in self._lines:
            here = [request for request in line if request.line is self]
            line.clear()
            line.extend(here)
        self._gone = 0


def is_late(request: InferRequest, now: float, finish: float) -> bool:
    """Whether a request that leaves its line at `now` cannot be answered by a batch that ends at `finish`, in seconds."""
    deadline, leave_by = request.deadline, request.leave_by
    return (leave_by is not None and leave_by <= now) or (deadline is not None and deadline <= finish)


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)


class FullError(Exception):
    """The queue, or one priority in it, has reached its bound; the text gives the bound."""


class Batch:
    """What `take` hands out.

    Attributes:
        bucket: of all its requests.
        requests: in order of arrival, at most `max_rows` rows in all; may be empty.
        late: requests past their deadline or timeout; they are not computed.
        rows: of `requests`.
    """

    __slots__ = ("bucket", "late", "requests", "rows")

    def __init__(self, bucket: Hashable, requests: list[InferRequest], late: list[InferRequest], rows: int) -> None:
        self.bucket = bucket
        self.requests = requests
        self.late = late
        self.rows = rows


class BatchQueue:
    """Takes requests one at a time and hands them out in batches.

    Attributes:
        limits: its bounds.
        pace: predicts how long batches take, so that batches wait or go accordingly; None leaves that to the limits alone.
    """

    def __init__(self, limits: BatchLimits, pace: Pace | None = None) -> None:
        self.limits = limits
        self.pace = pace
        self._targets = limits.targets
        self._max_rows, self._levels = limits.max_rows, limits.levels
        self._full_rows = limits.max_rows  # of a batch that no further request fits
        # Preferred sizes leave nothing to learn.
        self._growth = BatchGrowth(limits.max_rows) if limits.max_rows > 1 and not limits.preferred_rows else None
        self._max_waiting, self._max_bytes = limits.max_waiting, limits.max_waiting_bytes
        self._holds = limits.max_delay_s > 0 or limits.latency_target_s is not None  # a batch may wait for more requests
        self._count_levels = limits.levels > 1 or bool(limits.max_waiting_by_level)
        self._by_level = [0] * limits.levels
        # A line that was the only one when its last request left stays for the next request.
        self._lines: dict[Hashable, WaitingLine] = {}
        self._line = WaitingLine(_NO_BUCKET, limits.levels)  # of the latest request
        self._waiting = self._bytes = 0

    def __len__(self) -> int:
        return self._waiting

    def offer(self, request: InferRequest) -> None:
        """Queue a request that has just arrived.

        Raises:
            FullError: the queue is full; the request was not taken.
            ValueError: the request alone has more rows than a batch may have, or an unknown priority.
        """
        if request.rows > self._max_rows:
            raise ValueError(f"{request.rows} rows do not fit a batch of at most {self._max_rows}")
        if not 0 <= request.priority < self._levels:
            raise ValueError(f"priority {request.priority} is none of 0 to {self._levels - 1}")
        if self._waiting >= self._max_waiting:
            raise FullError(f"{self._max_waiting} requests wait")
        held = self._bytes + request.size
        if held > self._max_bytes and self._waiting:  # the transport bounds a single request
            raise FullError(f"requests of {self._bytes / 2**20:.0f} MiB wait, of at most {self._max_bytes / 2**20:.0f} MiB")
        if self._count_levels:
            self._enter_level(request.priority)
        line = self._line
        if request.bucket is not line.bucket:
            line = self._line_of(request.bucket)
        line.add(request)
        self._waiting += 1
        self._bytes = held

    def part(self) -> None:
        """Hand requests out one by one from now on."""
        self._full_rows, self._targets, self._holds, self._growth = 1, (1,), False, None

    def observe(self, bucket: Hashable, rows: int, seconds: float) -> None:
        """Learn from a batch of `rows` rows that took `seconds`: further ones grow as long as that makes rows cheaper."""
        if self._growth is not None:
            self._growth.observe(bucket, rows, seconds)

    def take(self, now: float, *, hurry: bool = False, begins: float | None = None) -> Batch | None:
        """The batch that should leave at `now` (seconds); None when none waits or waiting still pays (see `next_due`).

        Args:
            now: in seconds.
            hurry: end all waiting: no more requests will arrive.
            begins: when the batch will be computed, where that is later.
        """
        if not self._waiting:
            return None
        line = self._ready(now, hurry=hurry)
        if line is None:
            return None
        most, finish = self._most_rows(line, now), now if begins is None else begins
        if self.pace is not None:
            most = min(most, self.pace.most_rows(line.bucket))
            finish += self._must_take_s(line, most, self.pace)
        requests, late, rows = line.take(now, most, finish)
        self._left(requests, late)
        self._drop_empty(line)
        return Batch(line.bucket, requests, late, rows)

    def is_ready(self, now: float, *, hurry: bool = False) -> bool:
        """Whether `take` would return a batch."""
        return self._waiting > 0 and self._ready(now, hurry=hurry) is not None

    def has_full_batch(self, now: float) -> bool:
        """Whether `take` would return a batch that further requests would not enlarge."""
        line = self._ready(now, hurry=False) if self._waiting else None
        if line is None:
            return False
        full = self._most_useful_rows(line.bucket)
        return line.rows >= (full if self.pace is None else min(full, self.pace.most_rows(line.bucket)))

    def take_late(self, now: float) -> list[InferRequest]:
        """Take out every request whose time has run out, to make room."""
        late: list[InferRequest] = []
        for line in list(self._lines.values()):
            if (soonest := line.soonest) is not None and soonest <= now:
                late += line.take_late(now)
                self._drop_empty(line)
        self._left(late)
        return late

    def next_due(self, now: float) -> float | None:
        """When to call `take` next if no request arrives, in seconds; None when none waits."""
        if not self._waiting:
            return None
        return min(self._due(line, now) for line in self._lines.values() if line.rows)

    def remove(self, request: InferRequest) -> bool:
        """Take a cancelled request out; False when it is not here any more."""
        line = self._lines.get(request.bucket)
        if line is None or not line.remove(request):
            return False
        self._left([request])
        self._drop_empty(line)
        return True

    def lines(self) -> Iterator[WaitingLine]:
        """The lines that hold requests."""
        return (line for line in self._lines.values() if line.rows)

    def waiting_before(self, level: int) -> int:
        """Number of waiting requests that are as urgent as `level`, or more."""
        return sum(self._by_level[: level + 1]) if self._count_levels else self._waiting

    def rows_before(self, bucket: Hashable) -> int:
        """Waiting rows of a bucket."""
        line = self._lines.get(bucket)
        return 0 if line is None else line.rows

    def _ready(self, now: float, *, hurry: bool) -> WaitingLine | None:
        ready: Collection[WaitingLine] = self._lines.values()
        if self._holds and not hurry:
            ready = [line for line in ready if self._is_ready(line, now)]
        if len(ready) > 1:
            return min(ready, key=lambda line: line.urgency(now))
        return next(iter(ready), None)

    def _is_ready(self, line: WaitingLine, now: float) -> bool:
        return line.rows >= min(self._targets[-1], self._most_useful_rows(line.bucket)) or now >= self._due(line, now)

    def _due(self, line: WaitingLine, now: float) -> float:
        """When the line must go even if no request arrives."""
        first_arrival = line.first_arrival
        if self.pace is not None:
            due = self.pace.due(line.bucket, line.rows, first_arrival, line.soonest_deadline, now)
            bound = line.soonest_leave_by
        else:
            # Without a latency estimate, waiting risks the deadline.
            due, bound = first_arrival + self.limits.max_delay_s, line.soonest
        return first_arrival if bound is not None and bound <= due else due

    def _most_rows(self, line: WaitingLine, now: float) -> int:
        """Rows of the next batch: the largest preferred size that is filled; all, once the delay is over."""
        if len(self._targets) == 1 or self.limits.padded_rows:
            return self._most_useful_rows(line.bucket)
        delay = self.limits.max_delay_s
        if delay and now >= line.first_arrival + delay:
            return self._full_rows
        return next((target for target in self._targets if target <= line.rows), self._full_rows)

    def _most_useful_rows(self, bucket: Hashable) -> int:
        """Rows of a batch that further rows would not improve."""
        return self._full_rows if self._growth is None else self._growth.most_rows(bucket)

    def _must_take_s(self, line: WaitingLine, most_rows: int, pace: Pace) -> float:
        """Seconds that a request must have left to be worth computing."""
        if self._waiting == 1:
            return 0.0  # it delays no other request, and shows what batches cost now
        if line.rows > most_rows or len(self._lines) > 1:
            return pace.mostly_s(line.bucket, min(line.rows, most_rows))  # others can be answered in its place
        return pace.likely_s(line.bucket, line.rows)

    def _line_of(self, bucket: Hashable) -> WaitingLine:
        line = self._lines.get(bucket)
        if line is None:
            if not self._waiting:
                self._lines.clear()
            line = self._lines[bucket] = WaitingLine(bucket, self._levels)
        self._line = line
        return line

    def _drop_empty(self, line: WaitingLine) -> None:
        if not line.rows and len(self._lines) > 1:
            del self._lines[line.bucket]
            if self._line is line:
                self._line = WaitingLine(_NO_BUCKET, self._levels)

    def _enter_level(self, level: int) -> None:
        bound = self.limits.max_waiting_by_level.get(level)
        if bound is not None and self._by_level[level] >= bound:
            raise FullError(f"{bound} requests of priority {level + 1} wait")  # clients count priorities from 1
        self._by_level[level] += 1

    def _left(self, *left: list[InferRequest]) -> None:
        for requests in left:
            self._waiting -= len(requests)
            for request in requests:
                self._bytes -= request.size
                if self._count_levels:
                    self._by_level[request.priority] -= 1
