"""Latencies as an HDR histogram: every value within 0.05 %, a few thousand numbers however many requests there were.

Buckets are those of Gil Tene's HdrHistogram (http://hdrhistogram.org): 1024 steps per doubling. They are kept sparse, as two
arrays, so that a window of a measurement is folded and merged by numpy and travels between processes cheaply.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Nanoseconds: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

MANTISSA_BITS = 11
NANOSECONDS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencyHistogram:
    """How often each latency occurred.

    Attributes:
        values_ns: int64 [buckets], rising: the middle of each bucket that has something in it.
        counts: int64 [buckets], above 0.
        sum_ns: of all latencies, exactly.
        min_ns: the smallest, exactly; 0 when there is none.
        max_ns: the largest, exactly; 0 when there is none.
    """

    values_ns: Nanoseconds
    counts: Nanoseconds
    sum_ns: int
    min_ns: int
    max_ns: int

    @classmethod
    def of(cls, latencies_ns: Nanoseconds) -> LatencyHistogram:
        """From int64 [requests] nanoseconds, none negative; there may be none."""
        if not len(latencies_ns):
            return EMPTY
        values, counts = np.unique(_bucketed(latencies_ns), return_counts=True)
        return cls(
            values_ns=values,
            counts=counts.astype(np.int64),
            sum_ns=int(latencies_ns.sum()),
            min_ns=int(latencies_ns.min()),
            max_ns=int(latencies_ns.max()),
        )

    @classmethod
    def merged(cls, histograms: Iterable[LatencyHistogram]) -> LatencyHistogram:
        """The sum of some."""
        parts = [histogram for histogram in histograms if histogram.total]
        if not parts:
            return EMPTY
        values, where = np.unique(np.concatenate([part.values_ns for part in parts]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, where, np.concatenate([part.counts for part in parts]))
        return cls(
            values_ns=values,
            counts=counts,
            sum_ns=sum(part.sum_ns for part in parts),
            min_ns=min(part.min_ns for part in parts),
            max_ns=max(part.max_ns for part in parts),
        )

    @property
    def total(self) -> int:
        """How many latencies there are."""
        return int(self.counts.sum())

    @property
    def mean_ms(self) -> float:
        """Milliseconds; there must be a latency."""
        return self.sum_ns / self.total / NANOSECONDS_PER_MS

    def percentiles_ms(self, percents: Sequence[float]) -> list[float]:
        """Milliseconds that so many percent of the latencies do not pass (nearest rank); there must be a latency."""
        cumulated = np.cumsum(self.counts)
        ranks = [max(1, math.ceil(percent / 100 * self.total - 1e-9)) for percent in percents]
        values = self.values_ns[np.searchsorted(cumulated, ranks)].clip(self.min_ns, self.max_ns)
        return [float(value) for value in values / NANOSECONDS_PER_MS]

    def within(self, bound_ms: float) -> int:
        """How many latencies are no longer than a bound."""
        return int(self.counts[self.values_ns <= bound_ms * NANOSECONDS_PER_MS].sum())


EMPTY = LatencyHistogram(values_ns=np.empty(0, np.int64), counts=np.empty(0, np.int64), sum_ns=0, min_ns=0, max_ns=0)


def _bucketed(latencies_ns: Nanoseconds) -> Nanoseconds:
    """Each latency's bucket, by its middle: all but the leading bits are dropped."""
    _, bit_lengths = np.frexp(latencies_ns.astype(np.float64))
    shifts = np.maximum(bit_lengths.astype(np.int64) - MANTISSA_BITS, 0)
    bucketed: Nanoseconds = ((latencies_ns >> shifts) << shifts) + ((1 << shifts) >> 1)
    return bucketed
