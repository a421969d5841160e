"""The batching policy: decides which waiting requests run together, and when. Pure: no clock, no thread, no event loop.

Each bucket (requests that can be concatenated) has its own line, so that mixed shapes do not split each other's batches.
The most common case, one priority and one bucket at a time, costs least.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Final

from halfserve.serve.engine.padding.mixed_lengths import Candidate, MixedLengths
from halfserve.serve.engine.queueing.pace import BatchLimits, Pace
from halfserve.serve.engine.queueing.waiting_requests import WaitingLine, WaitingRequests
from halfserve.serve.engine.requests import InferRequest

BATCH_S: Final = 50e-6  # added to each batch's measured time: the way to its thread and back
LATEST: Final = 4  # batches that are compared with as many of a trial; the cheapest of each counts, as others were interrupted
# Halving a batch may make a row dearer by 1/32, doubling must make it cheaper by 1/16: in between nothing changes.
DEARER: Final = 1 / 32
CHEAPER: Final = 1 / 16
CLEARLY: Final = 1.5  # a trial batch whose rows cost this multiple ends the trial
STEPS: Final = (-1, 1, -2)  # sizes of successive trials, in doublings of the batch
# Batches between two trials; the pause doubles with each trial that changes nothing.
FIRST_PAUSE: Final = 16
LONGEST_PAUSE: Final = 1024
MAX_BUCKETS: Final = 256  # limits the memory that clients with varying shapes can take


class RowCosts:
    """Row costs in batches of one bucket. Batches of 2 ** n to 2 ** (n + 1) - 1 rows count as size n.

    Attributes:
        most_rows: most rows that the next batch should have.
    """

    __slots__ = (
        "_best", "_largest", "_latest", "_left", "_max_rows", "_pause", "_size", "_step", "_trial", "_wait", "most_rows",
    )  # fmt: skip

    def __init__(self, max_rows: int) -> None:
        self.most_rows = self._max_rows = max_rows
        self._largest = self._best = _size(max_rows)
        self._size = -1  # size of the latest batches
        self._latest: list[float] = []  # seconds per row of the latest batches, at most LATEST
        self._trial: list[float] | None = None  # seconds per row in the running trial
        self._left = 0  # remaining batches of the running trial
        self._step = 0  # index of the next trial's step
        self._wait = self._pause = FIRST_PAUSE

    @property
    def is_bounded(self) -> bool:
        """Whether the next batch should be smaller than the largest."""
        return self.most_rows < self._max_rows

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a batch that took `seconds`."""
        size, row_s = _size(rows), (seconds + BATCH_S) / rows
        if self._trial is not None:
            self._observe_trial(self._trial, size, row_s)
            return
        if size != self._size:
            self._size = size
            self._latest.clear()
        elif len(self._latest) >= LATEST:
            del self._latest[0]
        self._latest.append(row_s)
        self._wait -= 1
        if self._wait <= 0 and len(self._latest) >= LATEST:
            self._try()

    def _try(self) -> None:
        """Begin the next possible trial, if any: a larger batch needs rows that the bound has held back."""
        for _ in STEPS:
            size = self._size + STEPS[self._step]
            self._step = (self._step + 1) % len(STEPS)
            if 0 <= size <= self._largest and (size < self._size or self._size >= self._best):
                self._trial, self._left = [], LATEST
                self._bound(size)
                return

    def _observe_trial(self, trial: list[float], size: int, row_s: float) -> None:
        self._left -= 1
        tried = _size(self.most_rows)
        if size == tried:
            trial.append(row_s)
            if row_s > CLEARLY * min(self._latest):
                self._left = 0
        if self._left <= 0:
            self._decide(tried, trial)

    def _decide(self, tried: int, trial: list[float]) -> None:
        """End the trial, and keep its size if it has not made rows dearer."""
        step, usual_s = tried - self._size, min(self._latest)
        allowed_s = usual_s * (1 - CHEAPER * step if step > 0 else 1 - DEARER * step)
        if trial and min(trial) <= allowed_s:
            self._best, self._pause = tried, FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._trial, self._wait = None, self._pause
        self._size = -1
        self._latest.clear()
        self._bound(self._best)

    def _bound(self, size: int) -> None:
        self.most_rows = self._max_rows if size >= self._largest else 1 << size


def _size(rows: int) -> int:
    return rows.bit_length() - 1


class BatchGrowth:
    """Learns, by bucket, the largest useful number of rows in a batch of one model, from the cost of a row.

    On a GPU a further row is nearly free, and a batch should take all it can. On a CPU core, an image in a batch of 32 may cost
    more than in one of 8, because the batch exceeds the cache: the larger batch delays its requests and leaves their clients
    idle. Therefore some smaller or larger batches are tried now and then, and compared with the batches just before. Because
    both are recent, a drift of the machine's speed affects both, and a later trial corrects a wrong decision.
    """

    __slots__ = ("_costs", "_max_rows")

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._costs: OrderedDict[Hashable, RowCosts] = OrderedDict()

    def most_rows(self, bucket: Hashable) -> int:
        """Return the most rows that the next batch should have."""
        costs = self._costs.get(bucket)
        return self._max_rows if costs is None else costs.most_rows

    def observe(self, bucket: Hashable, rows: int, seconds: float) -> None:
        """Learn from a batch of `rows` rows that took `seconds`."""
        costs = self._costs.get(bucket)
        if costs is None:
            if rows < 2:
                return  # requests that arrive one at a time form no larger batch to compare with
            if len(self._costs) >= MAX_BUCKETS:
                self._costs.popitem(last=False)
            costs = self._costs[bucket] = RowCosts(self._max_rows)
        if rows > 1 or costs.is_bounded:
            costs.observe(rows, seconds)


class Batch:
    """Requests that `take` removes from the queue to run together.

    Attributes:
        bucket: bucket of all its requests; that of the longest one, if lengths are mixed.
        requests: requests in order of arrival, at most `max_rows` rows in all; may be empty.
        late: requests past their deadline or timeout, which are not computed.
        rows: total rows of `requests`.
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
        waiting: the requests.
        limits: bounds of the queue and its batches.
        pace: predicts how long batches take, which decides when they leave; None leaves that to the limits alone.
    """

    def __init__(self, limits: BatchLimits, pace: Pace | None = None, mixed: MixedLengths | None = None) -> None:
        """`mixed` chooses requests of different lengths for one batch; None keeps them apart."""
        self.limits = limits
        self.pace = pace
        self._mixed = mixed
        self._targets = limits.targets
        self._max_rows, self._levels = limits.max_rows, limits.levels
        self._full_rows = limits.max_rows  # rows of a batch that no further request fits
        # With preferred sizes, there is nothing to learn.
        self._growth = BatchGrowth(limits.max_rows) if limits.max_rows > 1 and not limits.preferred_rows else None
        self._holds = limits.max_delay_s > 0 or limits.latency_target_s is not None  # whether a batch may wait for more
        # Another shape ends the delay, unless mixed lengths may share the batch, or a latency target decides how long waiting
        # pays.
        self.waiting = WaitingRequests(
            limits, flushes=limits.max_delay_s > 0 and limits.latency_target_s is None and mixed is None
        )

    def __len__(self) -> int:
        return self.waiting.count

    def offer(self, request: InferRequest) -> None:
        """Queue a request that has just arrived.

        Raises:
            FullError: the queue is full; the request was not taken.
            ValueError: the request alone has more rows than a batch may have, or its priority is unknown.
        """
        if request.rows > self._max_rows:
            raise ValueError(f"{request.rows} rows do not fit a batch of at most {self._max_rows}")
        if not 0 <= request.priority < self._levels:
            raise ValueError(f"priority {request.priority} is none of 0 to {self._levels - 1}")
        self.waiting.add(request)

    def part(self) -> None:
        """Form batches of single requests from now on."""
        self._full_rows, self._targets, self._holds, self._growth, self._mixed = 1, (1,), False, None, None

    def observe(self, bucket: Hashable, rows: int, seconds: float) -> None:
        """Learn from a batch of `rows` rows that took `seconds`: batches grow as long as that makes rows cheaper."""
        if self._growth is not None:
            self._growth.observe(bucket, rows, seconds)
        if self._mixed is not None:
            self._mixed.observe(bucket, rows, seconds)

    def take(self, now: float, *, hurry: bool = False, begins: float | None = None) -> Batch | None:
        """Take the batch that should leave at `now` (seconds); None if none waits or waiting still pays (see `next_due`).

        Args:
            now: present time in seconds.
            hurry: whether to end all waiting, because no more requests will arrive.
            begins: time at which the batch will be computed, if that is later.
        """
        if not self.waiting.count:
            return None
        line = self._ready(now, hurry=hurry)
        if line is None:
            return None
        most, finish = self._most_rows(line, now), now if begins is None else begins
        if self.pace is not None:
            most = min(most, self.pace.most_rows(line.bucket))
            finish += self._must_take_s(line, most, self.pace)
        if self._mixed is not None:
            most = self._mixed.most_rows(line.bucket, most)
            if len(self.waiting.lines) > 1:
                lines = self._sharing(line, self._mixed, now, now if begins is None else begins)
                if len(lines) > 1:
                    return self._take_mixed(lines, now, finish)
        requests, late, rows = line.take(now, most, finish)
        self.waiting.left(requests, late)
        self.waiting.drop_empty(line)
        return Batch(line.bucket, requests, late, rows)

    def _sharing(self, line: WaitingLine, mixed: MixedLengths, now: float, begins: float) -> list[WaitingLine]:
        """Return the lines that form the next batch with `line`, the most urgent one, in rising length of their requests."""
        level = line.urgency(now)[0] // 2
        others = [
            Candidate(other.bucket, other.rows, other.soonest_deadline)
            for other in self.waiting.lines.values()
            if other is not line and other.rows and other.urgency(now)[0] // 2 == level
        ]
        buckets = mixed.group(Candidate(line.bucket, line.rows, line.soonest_deadline), others, self._bound, begins)
        return [self.waiting.lines[bucket] for bucket in buckets]

    def _take_mixed(self, lines: list[WaitingLine], now: float, finish: float) -> Batch:
        """Take a batch of all requests in these lines; the last line has the longest requests."""
        bucket = lines[-1].bucket
        requests: list[InferRequest] = []
        late: list[InferRequest] = []
        rows = 0
        for line in sorted(lines, key=lambda line: line.urgency(now)):
            taken, behind, count = line.take(now, line.rows, finish)
            requests += taken
            late += behind
            rows += count
            self.waiting.drop_empty(line)
        self.waiting.left(requests, late)
        return Batch(bucket, requests, late, rows)

    def is_ready(self, now: float, *, hurry: bool = False) -> bool:
        """Return whether `take` would return a batch."""
        return self.waiting.count > 0 and self._ready(now, hurry=hurry) is not None

    def has_full_batch(self, now: float) -> bool:
        """Return whether `take` would return a batch that further requests would not enlarge."""
        line = self._ready(now, hurry=False) if self.waiting.count else None
        if line is None:
            return False
        full = self._most_useful_rows(line.bucket)
        return line.rows >= (full if self.pace is None else min(full, self.pace.most_rows(line.bucket)))

    def next_due(self, now: float) -> float | None:
        """Return when to call `take` next if no request arrives, in seconds; None if none waits."""
        if not self.waiting.count:
            return None
        return min(self._due(line, now) for line in self.waiting.lines.values() if line.rows)

    def _ready(self, now: float, *, hurry: bool) -> WaitingLine | None:
        ready: Collection[WaitingLine] = self.waiting.lines.values()
        if self._holds and not hurry:
            ready = [line for line in ready if self._is_ready(line, now)]
        if len(ready) > 1:
            return min(ready, key=lambda line: line.urgency(now))
        return next(iter(ready), None)

    def _is_ready(self, line: WaitingLine, now: float) -> bool:
        return line.rows >= min(self._targets[-1], self._most_useful_rows(line.bucket)) or now >= self._due(line, now)

    def _due(self, line: WaitingLine, now: float) -> float:
        first_arrival = line.first_arrival
        if line.is_due:
            return first_arrival
        if self.pace is not None:
            due = self.pace.due(line.bucket, line.rows, first_arrival, line.soonest_deadline, now)
            bound = line.soonest_leave_by
        else:
            # Without a latency estimate, waiting risks the deadline.
            due, bound = first_arrival + self.limits.max_delay_s, line.soonest
        return first_arrival if bound is not None and bound <= due else due

    def _most_rows(self, line: WaitingLine, now: float) -> int:
        """Return the rows of the next batch: the largest preferred size that is filled; all rows, once the delay is over."""
        if len(self._targets) == 1 or self.limits.padded_rows:
            return self._most_useful_rows(line.bucket)
        delay = self.limits.max_delay_s
        if delay and now >= line.first_arrival + delay:
            return self._full_rows
        return next((target for target in self._targets if target <= line.rows), self._full_rows)

    def _most_useful_rows(self, bucket: Hashable) -> int:
        """Return the rows of a batch that further rows would not improve."""
        return self._full_rows if self._growth is None else self._growth.most_rows(bucket)

    def _bound(self, bucket: Hashable) -> int:
        """Return the most rows of a batch of mixed lengths, the longest of which belong to `bucket`."""
        most = self._most_useful_rows(bucket)
        return most if self.pace is None else min(most, self.pace.most_rows(bucket))

    def _must_take_s(self, line: WaitingLine, most_rows: int, pace: Pace) -> float:
        """Return the seconds that a request must have left to be worth computing."""
        if self.waiting.count == 1:
            return 0.0  # it delays no other request, and shows the present cost of a batch
        if line.rows > most_rows or len(self.waiting.lines) > 1:
            return pace.mostly_s(line.bucket, min(line.rows, most_rows))  # others can be answered in its place
        return pace.likely_s(line.bucket, line.rows)
