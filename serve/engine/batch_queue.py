"""The batching policy: which waiting requests run together, and when. Pure: no clock, no thread, no event loop.

A line per bucket (requests of one bucket can be concatenated), so that mixed shapes do not break each other's batches. Within
a bucket the more urgent go first, and the order of arrival is kept among equals; so it is among buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serve.engine.waiting_line import Waiting, WaitingLine

T = TypeVar("T", bound=Waiting)


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """How large a batch may become and how long a request may wait for one.

    Attributes:
        max_rows: rows in one batch, at least 1.
        max_delay_s: seconds that the first request of a batch waits for others; 0 sends what is there.
        preferred_rows: a bucket that holds one of these sizes need not wait any longer.
        max_waiting: requests in the queue, over all buckets.
        levels: priorities that requests may have.
        max_waiting_by_level: the same bound for one priority alone, where it has one.
    """

    max_rows: int
    max_delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    max_waiting: int = 8192
    levels: int = 1
    max_waiting_by_level: Mapping[int, int] = field(default_factory=dict)

    @property
    def targets(self) -> tuple[int, ...]:
        """Sizes at which waiting ends, largest first."""
        return tuple(sorted({self.max_rows, *(p for p in self.preferred_rows if p <= self.max_rows)}, reverse=True))


class FullError(Exception):
    """The queue, or the request's priority in it, holds as many as it may.

    Attributes:
        bound: how many that are.
    """

    def __init__(self, bound: int) -> None:
        super().__init__(f"{bound} requests wait")
        self.bound = bound


@dataclass(frozen=True)
class Batch(Generic[T]):
    """What `take` hands out.

    Attributes:
        requests: of one bucket, in order of arrival, at most `max_rows` rows in all; may be empty.
        expired: requests whose deadline had passed when their turn came; they are not to be computed.
    """

    requests: list[T]
    expired: list[T]


class BatchQueue(Generic[T]):
    """Takes requests in one at a time and gives them out in batches."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._targets = limits.targets
        self._lines: dict[Hashable, WaitingLine[T]] = {}
        self._waiting = 0
        self._by_level: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._waiting

    def offer(self, request: T, now: float) -> None:
        """Queue a request that arrives at `now` (seconds, any monotonic clock).

        Raises:
            FullError: the queue is full; the request was not taken.
            ValueError: the request alone has more rows than a batch may have, or its priority is none.
        """
        limits, level = self.limits, request.priority
        if request.rows > limits.max_rows:
            raise ValueError(f"{request.rows} rows do not fit a batch of at most {limits.max_rows}")
        if not 0 <= level < limits.levels:
            raise ValueError(f"priority {level} is none of 0 to {limits.levels - 1}")
        if self._waiting >= limits.max_waiting:
            raise FullError(limits.max_waiting)
        bound = limits.max_waiting_by_level.get(level)
        if bound is not None and self._by_level[level] >= bound:
            raise FullError(bound)
        line = self._lines.get(request.bucket)
        if line is None:
            line = self._lines[request.bucket] = WaitingLine(limits.levels)
        line.add(request, now)
        self._waiting += 1
        self._by_level[level] += 1

    def take(self, now: float, *, hurry: bool = False) -> Batch[T] | None:
        """The batch that should start at `now`; None when nothing waits or waiting still pays (see `next_due`).

        `hurry` ends all waiting: nothing more will arrive.
        """
        key = self._ready(now, hurry=hurry)
        if key is None:
            return None
        line = self._lines[key]
        target = next((t for t in self._targets if t <= line.rows), self.limits.max_rows)
        batch: Batch[T] = Batch([], [])
        rows = 0
        for request in line.next_in_line(now):
            # The first one always goes, even where it alone is larger than the preferred size.
            if rows and rows + request.rows > target:
                break
            self._leave(line, request)
            if request.deadline is not None and request.deadline <= now:
                batch.expired.append(request)
            else:
                batch.requests.append(request)
                rows += request.rows
        if not line:
            del self._lines[key]
        return batch

    def next_due(self) -> float | None:
        """When the next waiting bucket must start even if nothing more arrives; None when nothing waits."""
        if not self._lines:
            return None
        return min(line.first_arrival for line in self._lines.values()) + self.limits.max_delay_s

    def remove(self, request: T) -> bool:
        """Take a cancelled request out, which frees its place; False when it is not here any more."""
        line = self._lines.get(request.bucket)
        if line is None or not self._leave(line, request):
            return False
        if not line:
            del self._lines[request.bucket]
        return True

    def _leave(self, line: WaitingLine[T], request: T) -> bool:
        left = line.remove(request)
        if left:
            self._waiting -= 1
            self._by_level[request.priority] -= 1
        return left

    def _ready(self, now: float, *, hurry: bool) -> Hashable | None:
        ready = [
            (line.urgency, key)
            for key, line in self._lines.items()
            if hurry or line.rows >= self._targets[-1] or now >= line.first_arrival + self.limits.max_delay_s
        ]
        return min(ready, key=lambda entry: entry[0])[1] if ready else None
