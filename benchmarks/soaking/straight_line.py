"""A regression line through measurements, with the confidence interval of its slope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Two-sided 95 % points of Student's t distribution, for 1, 2, ... degrees of freedom.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
BLOCKS = 12  # neighbouring samples are similar, so the line is fitted to the means of this many stretches


@dataclass(frozen=True)
class Rise:
    """Increase of a value per unit of the independent variable, with its 95 % confidence interval."""

    per_unit: float
    low: float
    high: float

    def times(self, factor: float) -> Rise:
        """The increase per `factor` units."""
        return Rise(self.per_unit * factor, self.low * factor, self.high * factor)


def rise(against: Sequence[float], values: Sequence[float]) -> Rise:
    """Least squares over the means of `BLOCKS` stretches, with the usual interval of a regression line's slope.

    Args:
        against: time, or a number of requests, in rising order, at least `BLOCKS` of them.
        values: the measured values at these points.
    """
    places = np.array([part.mean() for part in np.array_split(np.array(against, np.float64), BLOCKS)])
    means = np.array([part.mean() for part in np.array_split(np.array(values, np.float64), BLOCKS)])
    spread = places - places.mean()
    slope = float(spread @ means / (spread @ spread))
    residuals = means - means.mean() - slope * spread
    error = float(np.sqrt(residuals @ residuals / (BLOCKS - 2) / (spread @ spread)))
    half = T_95[BLOCKS - 3] * error
    return Rise(slope, slope - half, slope + half)
