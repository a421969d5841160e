"""Decides when a batch should leave, from a latency model that is learned online and from the rate of arrivals. Pure.

A batch waits for one more request only while that shortens the total waiting time. Let n rows wait, let the next row be
expected in g seconds, and let a batch take a + b * n. Without waiting, the new row arrives during the batch and waits for the
rest of it, a + b * n - g, and then for its own batch, a + b. With waiting, the new row takes a + b * (n + 1), and each of the n
rows takes g + b longer. So waiting pays while (n + 1) * g + n * b < a.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

KEEP: Final = 0.99  # factor on the weight of all batches when the next one comes
RATIOS: Final = 256  # number of latest batches whose ratios are kept
REFRESH: Final = 32  # number of batches until the ratios are sorted again
STRAY: Final = 4.0  # a batch counts for at most this multiple of the expected time, and at least this fraction
OFF: Final = 2.0  # 8 batches in a row off by a factor of 2 restart the model
OFF_IN_A_ROW: Final = 8
CONFIDENT: Final = 16  # number of batches before it predicts
SAFE_RANK: Final = 0.99
FAIR_RANK: Final = 0.9
MAX_BUCKETS: Final = 256  # limits the memory that clients with varying shapes can take
GAP_SHARE: Final = 1 / 16  # weight of a new gap in the average
LONG_GAP: Final = 8.0  # cap of a gap, in average gaps
PATIENT_GAPS: Final = 3.0  # average gaps without an arrival that end the waiting
# A request that arrives just after a batch has started waits for that batch and is then part of one as large.
BATCHES_IN_A_TARGET: Final = 2.0
CHEAP_COMPANY: Final = 1.25  # rows that lengthen a batch of one row by at most this factor are always accepted


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The bounds of one model's queue.

    Attributes:
        max_rows: most rows in one batch, at least 1.
        max_delay_s: seconds that the first request of a batch waits for others; 0 never waits.
        preferred_rows: sizes at which a bucket waits no longer.
        max_waiting: most requests in the queue, over all buckets.
        max_waiting_bytes: most bytes that these hold; a single request may hold more.
        levels: number of priorities.
        max_waiting_by_level: `max_waiting` of single priorities; None for no bound of their own.
        max_waiting_of_others: `max_waiting` of each other priority.
        padded_rows: sizes that batches are padded to, in rising order; empty pads nothing.
        latency_target_s: seconds within which requests must be answered; others are refused. None sets no target.
        compute_weight: the model's weight among the models that share the compute slots.
    """

    max_rows: int
    max_delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    max_waiting: int = 8192
    max_waiting_bytes: int = 2**30
    levels: int = 1
    max_waiting_by_level: Mapping[int, int | None] = field(default_factory=dict)
    max_waiting_of_others: int | None = None
    padded_rows: tuple[int, ...] = ()
    latency_target_s: float | None = None
    compute_weight: float = 1.0

    @property
    def targets(self) -> tuple[int, ...]:
        """Batch sizes, in rows, at which waiting ends, largest first."""
        return tuple(sorted({self.max_rows, *(p for p in self.preferred_rows if 0 < p <= self.max_rows)}, reverse=True))


def padded_rows(rows: int, sizes: Sequence[int]) -> int:
    """Return the number of rows with which a batch of `rows` rows runs: the smallest of the rising `sizes` that holds it; else
    `rows`.
    """
    if not sizes:
        return rows
    return next((size for size in sizes if size >= rows), rows)


class LatencyModel:
    """Predicts the duration of batches of one bucket, fitted online: `a + b * rows` seconds.

    The fit uses least squares with exponential forgetting. The spread is kept as ratios of the latest batches, measured over
    fitted, and read by rank: unlike a standard deviation, that is robust against single batches that take ten times as long.

    Attributes:
        batches: number of batches observed.
        fixed_s: seconds that any batch takes (a); 0 until `is_confident`.
        per_row_s: seconds per row (b).
        safe: the 99th percentile of batch times, as a multiple of the fitted time; at least 1.
        fair: the 90th percentile, as such a multiple.
    """

    __slots__ = ("_n", "_nn", "_nt", "_off", "_ratios", "_t", "_weight", "batches", "fair", "fixed_s", "per_row_s", "safe")

    def __init__(self) -> None:
        self.batches = 0
        self.fixed_s = self.per_row_s = 0.0
        self.safe = self.fair = 1.0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self._off = 0
        self._ratios: deque[float] = deque(maxlen=RATIOS)

    @property
    def is_confident(self) -> bool:
        """Whether it has observed enough batches to predict."""
        return self.batches >= CONFIDENT

    def observe(self, rows: int, seconds: float, *, happened_before: bool = False) -> None:
        """Learn from a batch of `rows` rows that took `seconds`.

        `happened_before`: whether the cause of its delay also delayed another batch at that time, so that it is not counted as
        a second delay.
        """
        if self.batches >= CONFIDENT // 2:
            fitted = max(1e-9, self._fitted(rows))
            if self._is_new(seconds / fitted):
                self._restart(rows, seconds)
                return
            if not (happened_before and self._ratios):
                self._ratios.append(seconds / fitted)
            # A larger deviation is an outlier, or a new regime that the next batches will confirm.
            seconds = min(max(seconds, fitted / STRAY), fitted * STRAY)
        self._weight = self._weight * KEEP + 1.0
        self._n = self._n * KEEP + rows
        self._nn = self._nn * KEEP + rows * rows
        self._t = self._t * KEEP + seconds
        self._nt = self._nt * KEEP + rows * seconds
        self.batches += 1
        self._fit()
        if self.batches % REFRESH == 0 or self.batches == CONFIDENT:
            ranked = sorted(self._ratios)
            most = len(ranked) - 2  # with fewer than 100 ratios, ignore the largest one
            self.safe, self.fair = (max(1.0, ranked[min(int(rank * len(ranked)), most)]) for rank in (SAFE_RANK, FAIR_RANK))

    def _is_new(self, ratio: float) -> bool:
        """Return whether OFF_IN_A_ROW batches deviated in one direction, so that the learned times no longer hold."""
        sign = 1 if ratio > OFF else -1 if ratio < 1 / OFF else 0
        self._off = self._off + sign if sign and sign * self._off >= 0 else sign
        return abs(self._off) >= OFF_IN_A_ROW

    def _restart(self, rows: int, seconds: float) -> None:
        self.batches = self._off = 0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self._ratios.clear()
        self.safe = self.fair = 1.0
        self.observe(rows, seconds)

    def likely_s(self, rows: int) -> float:
        """Return the expected seconds of a batch; 0 until confident."""
        return self._fitted(rows) if self.batches >= CONFIDENT else 0.0

    def at_most_s(self, rows: int) -> float:
        """Return the 99th percentile of the seconds of a batch; 0 until confident."""
        return self.likely_s(rows) * self.safe

    def mostly_s(self, rows: int) -> float:
        """Return the 90th percentile of the seconds of a batch; 0 until confident."""
        return self.likely_s(rows) * self.fair

    def most_rows(self, seconds: float, limit: int) -> int:
        """Return the most rows, 1 to `limit`, of a batch that takes `seconds` at the 99th percentile; `limit` until confident.

        A batch of one row may take longer.
        """
        left = seconds / self.safe - self.fixed_s
        if not self.is_confident or left >= self.per_row_s * limit:
            return limit
        return max(1, int(left / self.per_row_s)) if left > 0 else 1

    def _fitted(self, rows: int) -> float:
        return self.fixed_s + self.per_row_s * rows

    def _fit(self) -> None:
        """Fit a >= 0 and b >= 0 by least squares: neither a batch nor a further row has a negative cost.

        The bounds also limit extrapolation: fewer rows than observed cost between their proportion and all of the usual time,
        more rows between the usual time and their proportion.
        """
        spread = self._weight * self._nn - self._n * self._n
        # With batches of one size, a and b cannot be distinguished, and a = 0 is the safe guess for larger batches.
        slope = self._nt / self._nn if spread <= 1e-9 * self._n * self._n else self._slope(spread)
        self.per_row_s = slope
        self.fixed_s = max(0.0, (self._t - slope * self._n) / self._weight)

    def _slope(self, spread: float) -> float:
        slope = (self._weight * self._nt - self._n * self._t) / spread
        if slope <= 0:
            return 0.0
        through_zero = self._nt / self._nn
        return slope if self._t >= slope * self._n else through_zero


class Arrivals:
    """Tracks how fast the requests of a bucket arrive.

    Attributes:
        gap_s: average seconds between two arrivals; None before the second.
        last_s: time of the latest arrival.
    """

    __slots__ = ("gap_s", "last_s")

    def __init__(self) -> None:
        self.gap_s: float | None = None
        self.last_s = 0.0

    def arrive(self, now: float) -> None:
        if self.last_s:
            gap = now - self.last_s
            usual = gap if self.gap_s is None else self.gap_s
            self.gap_s = usual + GAP_SHARE * (min(gap, LONG_GAP * usual + 1e-6) - usual)
        self.last_s = now


class Pace:
    """Learns, by bucket, the duration of one model's batches and its rate of requests. Predictions are 0 s until confident."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._known: OrderedDict[Hashable, tuple[LatencyModel, Arrivals]] = OrderedDict()

    def arrive(self, bucket: Hashable, now: float) -> bool:
        """Record an arrival at `now`, in seconds; returns whether the latency model is confident."""
        model, arrivals = self._known.get(bucket) or self._of(bucket)
        arrivals.arrive(now)
        return model.batches >= CONFIDENT

    def observe(self, bucket: Hashable, rows: int, seconds: float, *, happened_before: bool = False) -> None:
        """Learn from a batch; see `LatencyModel.observe`."""
        self._of(bucket)[0].observe(self._padded(rows), seconds, happened_before=happened_before)
        self._known.move_to_end(bucket)

    def likely_s(self, bucket: Hashable, rows: int) -> float:
        known = self._known.get(bucket)
        return known[0].likely_s(self._padded(rows)) if known else 0.0

    def at_most_s(self, bucket: Hashable, rows: int) -> float:
        known = self._known.get(bucket)
        return known[0].at_most_s(self._padded(rows)) if known else 0.0

    def mostly_s(self, bucket: Hashable, rows: int) -> float:
        known = self._known.get(bucket)
        return known[0].mostly_s(self._padded(rows)) if known else 0.0

    def most_rows(self, bucket: Hashable) -> int:
        """Return the rows of the largest batch that meets the latency target."""
        target, known = self.limits.latency_target_s, self._known.get(bucket)
        if target is None or known is None:
            return self.limits.max_rows
        least = CHEAP_COMPANY * self.at_most_s(bucket, 1)
        return known[0].most_rows(min(target, max(target / BATCHES_IN_A_TARGET, least)), self.limits.max_rows)

    def is_confident(self, bucket: Hashable) -> bool:
        known = self._known.get(bucket)
        return known is not None and known[0].is_confident

    def expected(self, bucket: Hashable, seconds: float) -> int:
        """Return the number of requests expected within `seconds`."""
        known = self._known.get(bucket)
        gap = known[1].gap_s if known else None
        return int(seconds / gap) if gap else 0

    def due(self, bucket: Hashable, rows: int, first_arrival: float, deadline: float | None, now: float) -> float:
        """Return when a bucket's waiting rows must leave even if no request arrives, in seconds; `now` or earlier means at
        once.
        """
        limits = self.limits
        due = first_arrival + limits.max_delay_s
        if limits.latency_target_s is not None:
            due = self._due_by_gain(bucket, rows, first_arrival, now)
            if limits.max_delay_s:
                due = min(due, first_arrival + limits.max_delay_s)
        if deadline is None or due <= now:
            return due
        if not self.is_confident(bucket):
            return first_arrival if deadline <= due else due
        return min(due, deadline - self.at_most_s(bucket, rows + 1))

    def _due_by_gain(self, bucket: Hashable, rows: int, first_arrival: float, now: float) -> float:
        known = self._known.get(bucket)
        if known is None or not known[0].is_confident or rows >= self.most_rows(bucket):
            return now
        model, arrivals = known
        gap = arrivals.gap_s
        if gap is None or (rows + 1) * gap + rows * model.per_row_s >= model.fixed_s:
            return now
        left = (self.limits.latency_target_s or 0.0) - model.at_most_s(self._padded(rows + 1))
        return min(arrivals.last_s + PATIENT_GAPS * gap, first_arrival + left)

    def _padded(self, rows: int) -> int:
        return padded_rows(rows, self.limits.padded_rows)

    def _of(self, bucket: Hashable) -> tuple[LatencyModel, Arrivals]:
        known = self._known.get(bucket)
        if known is None:
            if len(self._known) >= MAX_BUCKETS:
                self._known.popitem(last=False)
            known = self._known[bucket] = (LatencyModel(), Arrivals())
        return known
