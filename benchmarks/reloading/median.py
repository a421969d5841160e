"""A median with its 95 % confidence interval, for values of any distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Median:
    """The median of some values, and the bounds of the true median with 95 % confidence."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float]) -> Median:
    """The median, with the interval between two of the values that follows from the sign test.

    Each value is above the true median with probability 1/2, so the number of values above it is binomial (W. J. Conover,
    Practical Nonparametric Statistics, section 3.2). Fewer than six values give no 95 % interval; it then spans all values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the median of no values was asked for, expected one at least")
    ordered = sorted(values)
    count, middle = len(ordered), len(ordered) // 2
    value = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    rank, below = 0, 0.5**count  # the probability that at most `rank` values are below the true median
    while 2 * below <= 1 - CONFIDENCE:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    outside = max(0, rank - 1)
    return Median(value=value, low=ordered[outside], high=ordered[count - 1 - outside])
