"""Learns how many rows a batch should have, from the cost of a row in larger and smaller batches. Pure.

On a GPU a further row is nearly free, and a batch should take all it can. On a CPU core, an image in a batch of 32 may cost
more than in one of 8, because the batch exceeds the cache: the larger batch delays its requests and leaves their clients idle.
Therefore some smaller or larger batches are tried now and then, and compared with the batches just before. Because both are
recent, a drift of the machine's speed affects both, and a later trial corrects a wrong decision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

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
        "_best",
        "_largest",
        "_latest",
        "_left",
        "_max_rows",
        "_pause",
        "_size",
        "_step",
        "_trial",
        "_wait",
        "most_rows",
    )

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
    """Learns, by bucket, the largest useful number of rows in a batch of one model."""

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
