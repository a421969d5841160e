"""Compares the error that the rounding simulation predicts for a half-precision model with a device's actual error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from halfserve.export.half_types import FP16, HalfType
from tests.export.conversions.cases import Value


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of one model relative to the reference's largest magnitude; infinite if only one side is finite.

    Attributes:
        predicted: The error of the simulation.
        found: The error on the device.
        rounding: The error of one rounding of the largest magnitude.
    """

    predicted: float
    found: float
    rounding: float = 2.0**-FP16.significant_bits

    @property
    def ratio(self) -> float:
        """The found error divided by the predicted one, which is at least one rounding."""
        if math.isinf(self.predicted):
            return float(math.isinf(self.found))
        return self.found / max(self.predicted, self.rounding)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Accuracy of the predicted errors of several models.

    Attributes:
        number: The number of models.
        within: Share of the models whose error is at most the predicted one.
        within_twice: Share of the models whose error is at most twice the predicted one.
        median: The median of the ratios of found to predicted errors.
        percentile_95: The 95th percentile of these ratios.
        worst: Names and ratios of the models, largest ratio first.
    """

    number: int
    within: float
    within_twice: float
    median: float
    percentile_95: float
    worst: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, ratios: Mapping[str, float]) -> Agreement:
        """Compute the agreement of one or more models from their ratios by name."""
        ordered = sorted(ratios.items(), key=lambda item: -item[1])
        found = [ratio for _, ratio in reversed(ordered)]
        within, within_twice = (sum(ratio <= bound for ratio in found) / len(found) for bound in (1, 2))
        median, percentile_95 = (found[min(len(found) - 1, int(part * len(found)))] for part in (0.5, 0.95))
        return cls(
            number=len(found),
            within=within,
            within_twice=within_twice,
            median=median,
            percentile_95=percentile_95,
            worst=tuple(ordered),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Number, shares, median, 95th percentile and largest ratio, for a table."""
        shares, places = (self.within, self.within_twice), (self.median, self.percentile_95, self.worst[0][1])
        return (str(self.number), *(f"{share:.1%}" for share in shares), *(f"{place:.2f}" for place in places))


def error_of(wanted: Value, answer: Value, half: HalfType = FP16) -> float:
    """The largest difference from a float32 answer, relative to its largest finite magnitude; 0 for non-floating answers."""
    if isinstance(wanted, list) and isinstance(answer, list):
        return max((error_of(one, other, half) for one, other in zip(wanted, answer, strict=True)), default=0.0)
    if not isinstance(wanted, np.ndarray) or not np.issubdtype(wanted.dtype, np.floating):
        return 0.0
    exact, other = wanted.astype(np.float64), np.asarray(answer).astype(np.float64)
    finite = np.isfinite(exact)
    if exact.shape != other.shape or not np.array_equal(finite, np.isfinite(other)):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(other[finite] - exact[finite]).max() / max(np.abs(exact[finite]).max(), half.smallest_normal))
