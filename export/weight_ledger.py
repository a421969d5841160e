"""Counts of what rounding to float16 does to the elements of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FP16_MAX = 65504.0
FP16_OVERFLOW = 65520.0  # halfway to the next power of two: from here on, rounding gives infinity
FP16_SMALLEST_NORMAL = 2.0**-14
FP16_LARGEST_FLUSHED = 2.0**-25  # the tie between 0 and the smallest subnormal 2**-24 goes to the even one: 0


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Counts of what rounding a tensor to float16 does to its elements.

    Attributes:
        overflow: Finite elements over 65504 in magnitude, which float16 cannot hold.
        flushed: Non-zero elements that become zero (magnitude at most 2**-25).
        subnormal: Elements that stay non-zero below 2**-14, where float16 has fewer than 11 significant bits.
    """

    overflow: int = 0
    flushed: int = 0
    subnormal: int = 0

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(
            overflow=self.overflow + other.overflow,
            flushed=self.flushed + other.flushed,
            subnormal=self.subnormal + other.subnormal,
        )


def ledger_of(values: np.ndarray[Any, Any]) -> Ledger:
    """Count what rounding a floating array to float16 does to its elements."""
    magnitude = np.abs(values)
    return Ledger(
        overflow=int(np.count_nonzero(np.isfinite(magnitude) & (magnitude > FP16_MAX))),
        flushed=int(np.count_nonzero((magnitude > 0) & (magnitude <= FP16_LARGEST_FLUSHED))),
        subnormal=int(np.count_nonzero((magnitude > FP16_LARGEST_FLUSHED) & (magnitude < FP16_SMALLEST_NORMAL))),
    )
