"""Counts of what rounding to a half-precision type does to the elements of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.export.half_types import FP16, HalfType

FP16_MAX = FP16.largest
FP16_OVERFLOW = FP16.overflow_from
FP16_SMALLEST_NORMAL = FP16.smallest_normal


@dataclass(frozen=True, kw_only=True)
class WeightLedger:
    """Counts of what rounding a tensor does to its elements; the numbers are those of float16.

    Attributes:
        overflow: Finite elements beyond the type's range: over 65504 in magnitude.
        flushed: Non-zero elements that become zero (magnitude at most 2**-25).
        subnormal: Elements that stay non-zero below 2**-14, where the type has fewer significant bits.
    """

    overflow: int = 0
    flushed: int = 0
    subnormal: int = 0

    def __add__(self, other: WeightLedger) -> WeightLedger:
        return WeightLedger(
            overflow=self.overflow + other.overflow,
            flushed=self.flushed + other.flushed,
            subnormal=self.subnormal + other.subnormal,
        )


def ledger_of(values: np.ndarray[Any, Any], half: HalfType = FP16) -> WeightLedger:
    """Count what rounding a floating array does to its elements."""
    magnitude = np.abs(values)
    return WeightLedger(
        overflow=int(np.count_nonzero(np.isfinite(magnitude) & (magnitude > half.largest))),
        flushed=int(np.count_nonzero((magnitude > 0) & (magnitude <= half.largest_flushed))),
        subnormal=int(np.count_nonzero((magnitude > half.largest_flushed) & (magnitude < half.smallest_normal))),
    )
