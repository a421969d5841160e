"""The batching policy: which waiting requests run together, and when. Pure: no clock, no thread, no event loop.

A line per bucket (requests of one bucket can be concatenated), so that mixed shapes do not break each other's batches. Within
a bucket the more urgent go first, and the order of arrival is kept among equals; so it is among buckets.

What most models have costs least: one priority and one bucket at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.pace import Pace
from serve.engine.queueing.waiting_line import Waiting, WaitingLine

T = TypeVar("T", bound=Waiting)
_NOBODY = object()  # the bucket of no request


class FullError(Exception):
    """The queue, or the request's priority in it, holds as much as it may; the text says how much that is."""


@dataclass(slots=True)
class Batch(Generic[T]):
    """What `take` hands out.

    Attributes:
        bucket: of all its requests.
        requests: in order of arrival, at most `max_rows` rows in all; may be empty.
        late: requests that cannot be answered before their deadline any more, or have waited for as long as they may; they
            are not to be computed.
        rows: of `requests`.
    """

    bucket: Hashable
    requests: list[T]
    late: list[T]
    rows: int


class BatchQueue(Generic[T]):
    """Takes requests in one at a time and gives them out in batches.

    Attributes:
        limits: its bounds.
        pace: knows how long batches take, and has batches wait or go accordingly; None leaves that to the limits alone.
    """

    def __init__(self, limits: BatchLimits, pace: Pace | None = None) -> None:
        self.limits = limits
        self.pace = pace
        self._targets = limits.targets
        self._max_rows, self._levels = limits.max_rows, limits.levels
        self._full_rows = limits.max_rows  # of a batch that nobody else could join
        self._max_waiting, self._max_bytes = limits.max_waiting, limits.max_waiting_bytes
        self._holds = limits.max_delay_s > 0 or limits.latency_target_s is not None  # a batch may wait for more requests
        self._count_levels = limits.levels > 1 or bool(limits.max_waiting_by_level)
        self._by_level = [0] * limits.levels
        # Lines in which somebody waits. One that was alone when its last request left stays for the next request.
        self._lines: dict[Hashable, WaitingLine[T]] = {}
        self._line: WaitingLine[T] = WaitingLine(_NOBODY, limits.levels)  # that the last request joined
        self._waiting = self._bytes = 0

    def __len__(self) -> int:
        return self._waiting

    def offer(self, request: T) -> None:
        """Queue a request that has just arrived.

        Raises:
            FullError: the queue is full; the request was not taken.
            ValueError: the request alone has more rows than a batch may have, or its priority is none.
        """
        if request.rows > self._max_rows:
            raise ValueError(f"{request.rows} rows do not fit a batch of at most {self._max_rows}")
        if not 0 <= request.priority < self._levels:
            raise ValueError(f"priority {request.priority} is none of 0 to {self._levels - 1}")
        if self._waiting >= self._max_waiting:
            raise FullError(f"{self._max_waiting} requests wait")
        held = self._bytes + request.size
        if held > self._max_bytes and self._waiting:  # a request alone is as large as messages may be
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
        """Give requests out one by one from now on: waiting for others does not pay any more, and none can join."""
        self._full_rows, self._targets, self._holds = 1, (1,), False

    def take(self, now: float, *, hurry: bool = False, begins: float | None = None) -> Batch[T] | None:
        """The batch that should leave at `now` (seconds); None when nothing waits or waiting still pays (see `next_due`).

        `hurry` ends all waiting: nothing more will arrive. `begins` is when the batch will be computed, where that is later.
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
        """Whether `take` would hand something out."""
        return self._waiting > 0 and self._ready(now, hurry=hurry) is not None

    def has_full_batch(self, now: float) -> bool:
        """Whether `take` would hand out a batch that further requests would not make any larger."""
        line = self._ready(now, hurry=False) if self._waiting else None
        if line is None:
            return False
        return line.rows >= (self._full_rows if self.pace is None else min(self._full_rows, self.pace.most_rows(line.bucket)))

    def take_late(self, now: float) -> list[T]:
        """Let all leave whose time has run out, wherever they stand: their places are wanted."""
        late: list[T] = []
        for line in list(self._lines.values()):
            if (soonest := line.soonest) is not None and soonest <= now:
                late += line.take_late(now)
                self._drop_empty(line)
        self._left(late)
        return late

    def next_due(self, now: float) -> float | None:
        """When to ask `take` next if nothing more arrives, in seconds; None when nothing waits."""
        if not self._waiting:
            return None
        return min(self._due(line, now) for line in self._lines.values() if line.rows)

    def remove(self, request: T) -> bool:
        """Take a cancelled request out, which frees its place; False when it is not here any more."""
        line = self._lines.get(request.bucket)
        if line is None or not line.remove(request):
            return False
        self._left([request])
        self._drop_empty(line)
        return True

    def lines(self) -> Iterator[WaitingLine[T]]:
        """The lines in which somebody waits."""
        return (line for line in self._lines.values() if line.rows)

    def waiting_before(self, level: int) -> int:
        """How many of those that wait are as urgent as `level`, or more."""
        return sum(self._by_level[: level + 1]) if self._count_levels else self._waiting

    def rows_before(self, bucket: Hashable) -> int:
        """Rows of a bucket that wait."""
        line = self._lines.get(bucket)
        return 0 if line is None else line.rows

    def _ready(self, now: float, *, hurry: bool) -> WaitingLine[T] | None:
        ready: Collection[WaitingLine[T]] = self._lines.values()
        if self._holds and not hurry:
            ready = [line for line in ready if self._is_ready(line, now)]
        if len(ready) > 1:
            return min(ready, key=lambda line: line.urgency(now))
        return next(iter(ready), None)

    def _is_ready(self, line: WaitingLine[T], now: float) -> bool:
        return line.rows >= self._targets[-1] or now >= self._due(line, now)

    def _due(self, line: WaitingLine[T], now: float) -> float:
        """When the line must go even if nothing more arrives."""
        if self.pace is not None:
            due, bound = self.pace.due(line, now), line.soonest_leave_by
        else:
            # Nobody knows how long a batch takes here: to wait could only cost the request its deadline.
            due, bound = line.first_arrival + self.limits.max_delay_s, line.soonest
        return line.first_arrival if bound is not None and bound <= due else due

    def _most_rows(self, line: WaitingLine[T], now: float) -> int:
        """The largest preferred size there is; all there is once the wait has been too long, and where batches are padded."""
        if len(self._targets) == 1 or self.limits.padded_rows:
            return self._full_rows
        delay = self.limits.max_delay_s
        if delay and now >= line.first_arrival + delay:
            return self._full_rows
        return next((target for target in self._targets if target <= line.rows), self._full_rows)

    def _must_take_s(self, line: WaitingLine[T], most_rows: int, pace: Pace) -> float:
        """Seconds that requests must have left to be worth computing."""
        if self._waiting == 1:
            return 0.0  # it takes nobody's time, and shows what batches cost now
        if line.rows > most_rows or len(self._lines) > 1:
            return pace.mostly_s(line.bucket, min(line.rows, most_rows))  # others can be answered in its place
        return pace.likely_s(line.bucket, line.rows)

    def _line_of(self, bucket: Hashable) -> WaitingLine[T]:
        line = self._lines.get(bucket)
        if line is None:
            if not self._waiting:
                self._lines.clear()
            line = self._lines[bucket] = WaitingLine(bucket, self._levels)
        self._line = line
        return line

    def _drop_empty(self, line: WaitingLine[T]) -> None:
        if not line.rows and len(self._lines) > 1:
            del self._lines[line.bucket]
            if self._line is line:
                self._line = WaitingLine(_NOBODY, self._levels)

    def _enter_level(self, level: int) -> None:
        bound = self.limits.max_waiting_by_level.get(level)
        if bound is not None and self._by_level[level] >= bound:
            raise FullError(f"{bound} requests of priority {level + 1} wait")  # clients count priorities from 1
        self._by_level[level] += 1

    def _left(self, *left: list[T]) -> None:
        for requests in left:
            self._waiting -= len(requests)
            for request in requests:
                self._bytes -= request.size
                if self._count_levels:
                    self._by_level[request.priority] -= 1
