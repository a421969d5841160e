"""When a batch should go, from how long batches take and how fast requests come. Pure, as `batch_queue`.

A batch waits for one more request only while that shortens what the requests wait in all. Say n rows wait, the next is
expected in g seconds, and a batch takes a + b * n. Without it, the newcomer arrives into a running batch and waits for the rest
of it, a + b * n - g, and then for its own, a + b. With it, the newcomer takes a + b * (n + 1), and each of the n takes g + b
longer. So waiting pays while (n + 1) * g + n * b < a.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.latency_model import CONFIDENT, LatencyModel
from serve.engine.queueing.padding import padded_rows
from serve.engine.queueing.waiting_line import WaitingLine

MAX_BUCKETS = 256  # that are learned apart; a client that varies its shapes endlessly costs no more
GAP_SHARE = 1 / 16  # of a new gap in the average of gaps
LONG_GAP = 8.0  # a pause counts for no more than so many usual gaps
PATIENT_GAPS = 3.0  # usual gaps without anybody new: those who come are all there
# A request that arrives just after a batch has started waits for that batch and then takes part in one as large.
BATCHES_IN_A_TARGET = 2.0
CHEAP_COMPANY = 1.25  # rows that make a batch of one take no longer than so many times are always let in


class Arrivals:
    """How fast the requests of a bucket come.

    Attributes:
        gap_s: between two of them, on average; None before the second.
        last_s: when the latest came.
    """

    __slots__ = ("gap_s", "last_s")

    def __init__(self) -> None:
        self.gap_s: float | None = None
        self.last_s = 0.0

    def arrive(self, now: float) -> None:
        """Note one that comes at `now`, in seconds."""
        if self.last_s:
            gap = now - self.last_s
            usual = gap if self.gap_s is None else self.gap_s
            self.gap_s = usual + GAP_SHARE * (min(gap, LONG_GAP * usual + 1e-6) - usual)
        self.last_s = now


class Pace:
    """Learns how fast one model's batches run and its requests come."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._known: OrderedDict[Hashable, tuple[LatencyModel, Arrivals]] = OrderedDict()

    # Learning

    def arrive(self, bucket: Hashable, now: float) -> bool:
        """Note a request that comes at `now`, in seconds; whether enough batches were seen to foretell."""
        model, arrivals = self._known.get(bucket) or self._of(bucket)
        arrivals.arrive(now)
        return model.batches >= CONFIDENT

    def observe(self, bucket: Hashable, rows: int, seconds: float, *, happened_before: bool = False) -> None:
        """Learn from a batch of `rows` rows that took `seconds`; for `happened_before` see `LatencyModel.observe`."""
        self._of(bucket)[0].observe(self._padded(rows), seconds, happened_before=happened_before)
        self._known.move_to_end(bucket)

    # Foretelling; 0 seconds as long as that is a guess

    def likely_s(self, bucket: Hashable, rows: int) -> float:
        """Seconds that a batch should take."""
        known = self._known.get(bucket)
        return known[0].likely_s(self._padded(rows)) if known else 0.0

    def at_most_s(self, bucket: Hashable, rows: int) -> float:
        """Seconds that all but 1 % of such batches stay below."""
        known = self._known.get(bucket)
        return known[0].at_most_s(self._padded(rows)) if known else 0.0

    def mostly_s(self, bucket: Hashable, rows: int) -> float:
        """Seconds that all but 10 % of such batches stay below."""
        known = self._known.get(bucket)
        return known[0].mostly_s(self._padded(rows)) if known else 0.0

    def most_rows(self, bucket: Hashable) -> int:
        """Rows of the largest batch with which the latency target can be held."""
        target, known = self.limits.latency_target_s, self._known.get(bucket)
        if target is None or known is None:
            return self.limits.max_rows
        least = CHEAP_COMPANY * self.at_most_s(bucket, 1)
        return known[0].most_rows(min(target, max(target / BATCHES_IN_A_TARGET, least)), self.limits.max_rows)

    def is_confident(self, bucket: Hashable) -> bool:
        """Whether enough batches were seen to foretell."""
        known = self._known.get(bucket)
        return known is not None and known[0].is_confident

    def expected(self, bucket: Hashable, seconds: float) -> int:
        """Requests that should come within so many seconds."""
        known = self._known.get(bucket)
        gap = known[1].gap_s if known else None
        return int(seconds / gap) if gap else 0

    # Waiting

    def due(self, line: WaitingLine[Any], now: float) -> float:
        """When a line must go even if nothing more arrives, in seconds; `now` or earlier: at once."""
        limits = self.limits
        due = line.first_arrival + limits.max_delay_s
        if limits.latency_target_s is not None:
            due = self._due_by_gain(line, now)
            if limits.max_delay_s:
                due = min(due, line.first_arrival + limits.max_delay_s)
        if line.soonest_deadline is None or due <= now:
            return due
        if not self.is_confident(line.bucket):
            return line.first_arrival if line.soonest_deadline <= due else due
        return min(due, line.soonest_deadline - self.at_most_s(line.bucket, line.rows + 1))

    def _due_by_gain(self, line: WaitingLine[Any], now: float) -> float:
        known = self._known.get(line.bucket)
        if known is None or not known[0].is_confident or line.rows >= self.most_rows(line.bucket):
            return now
        model, arrivals = known
        gap, rows = arrivals.gap_s, line.rows
        if gap is None or (rows + 1) * gap + rows * model.per_row_s >= model.fixed_s:
            return now
        left = (self.limits.latency_target_s or 0.0) - model.at_most_s(self._padded(rows + 1))
        return min(arrivals.last_s + PATIENT_GAPS * gap, line.first_arrival + left)

    def _padded(self, rows: int) -> int:
        return padded_rows(rows, self.limits.padded_rows)

    def _of(self, bucket: Hashable) -> tuple[LatencyModel, Arrivals]:
        known = self._known.get(bucket)
        if known is None:
            if len(self._known) >= MAX_BUCKETS:
                self._known.popitem(last=False)
            known = self._known[bucket] = (LatencyModel(), Arrivals())
        return known
