"""The batching policy: which waiting requests run together, and when. Pure: no clock, no thread, no event loop.

A queue per bucket (requests of one bucket can be concatenated), so that mixed shapes do not break each other's batches. Within
a bucket the order of arrival is kept; among buckets the one whose first request has waited longest goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the policy needs to know of a request."""

    @property
    def rows(self) -> int:
        """Rows it adds to a batch."""

    @property
    def bucket(self) -> Hashable:
        """What it can be concatenated with."""

    @property
    def deadline(self) -> float | None:
        """When it is no longer worth computing, in seconds."""


T = TypeVar("T", bound=Waiting)


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """How large a batch may become and how long a request may wait for one.

    Attributes:
        max_rows: rows in one batch, at least 1.
        max_delay_s: seconds that the first request of a batch waits for others; 0 sends what is there.
        preferred_rows: a bucket that holds one of these sizes need not wait any longer.
        max_waiting: requests in the queue, over all buckets.
    """

    max_rows: int
    max_delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    max_waiting: int = 8192

    @property
    def targets(self) -> tuple[int, ...]:
        """Sizes at which waiting ends, largest first."""
        return tuple(sorted({self.max_rows, *(p for p in self.preferred_rows if p <= self.max_rows)}, reverse=True))


class FullError(Exception):
    """The queue holds `max_waiting` requests."""


@dataclass(frozen=True)
class Batch(Generic[T]):
    """What `take` hands out.

    Attributes:
        requests: of one bucket, in order of arrival, at most `max_rows` rows in all; may be empty.
        expired: requests whose deadline had passed when their turn came; they are not to be computed.
    """

    requests: list[T]
    expired: list[T]


class _Bucket(Generic[T]):
    """One queue, with the number of rows in it."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, T]] = deque()  # (arrival, request)
        self.rows = 0

    @property
    def first_arrival(self) -> float:
        return self.entries[0][0]


class BatchQueue(Generic[T]):
    """Takes requests in one at a time and gives them out in batches."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._targets = limits.targets
        self._buckets: dict[Hashable, _Bucket[T]] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def offer(self, request: T, now: float) -> None:
        """Queue a request that arrives at `now` (seconds, any monotonic clock).

        Raises:
            FullError: the queue is full; the request was not taken.
            ValueError: the request alone has more rows than a batch may have.
        """
        if request.rows > self.limits.max_rows:
            raise ValueError(f"{request.rows} rows do not fit a batch of at most {self.limits.max_rows}")
        if self._waiting >= self.limits.max_waiting:
            raise FullError
        bucket = self._buckets.get(request.bucket)
        if bucket is None:
            bucket = self._buckets[request.bucket] = _Bucket()
        bucket.entries.append((now, request))
        bucket.rows += request.rows
        self._waiting += 1

    def take(self, now: float, *, hurry: bool = False) -> Batch[T] | None:
        """The batch that should start at `now`; None when nothing waits or waiting still pays (see `next_due`).

        `hurry` ends all waiting: nothing more will arrive.
        """
        key = self._ready_bucket(now, hurry=hurry)
        if key is None:
            return None
        bucket = self._buckets[key]
        target = next((t for t in self._targets if t <= bucket.rows), self.limits.max_rows)
        batch: Batch[T] = Batch([], [])
        rows = 0
        # The first one always goes, even where it alone is larger than the preferred size.
        while bucket.entries and (not rows or rows + bucket.entries[0][1].rows <= target):
            _, request = bucket.entries.popleft()
            bucket.rows -= request.rows
            self._waiting -= 1
            if request.deadline is not None and request.deadline <= now:
                batch.expired.append(request)
            else:
                batch.requests.append(request)
                rows += request.rows
        if not bucket.entries:
            del self._buckets[key]
        return batch

    def next_due(self) -> float | None:
        """When the next waiting bucket must start even if nothing more arrives; None when nothing waits."""
        if not self._buckets:
            return None
        return min(bucket.first_arrival for bucket in self._buckets.values()) + self.limits.max_delay_s

    def remove(self, request: T) -> bool:
        """Take a cancelled request out, which frees its place; False when it is not here any more."""
        bucket = self._buckets.get(request.bucket)
        entry = next((e for e in bucket.entries if e[1] is request), None) if bucket else None
        if bucket is None or entry is None:
            return False
        bucket.entries.remove(entry)
        bucket.rows -= request.rows
        self._waiting -= 1
        if not bucket.entries:
            del self._buckets[request.bucket]
        return True

    def _ready_bucket(self, now: float, *, hurry: bool) -> Hashable | None:
        ready = [
            (bucket.first_arrival, key)
            for key, bucket in self._buckets.items()
            if hurry or bucket.rows >= self._targets[-1] or now >= bucket.first_arrival + self.limits.max_delay_s
        ]
        return min(ready, key=lambda entry: entry[0])[1] if ready else None
