"""How far an answer is from the fp32 twin's. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from serve.engine.precision_guard.counters import DriftHistogram
from serve.engine.tensors import Array

# Scaled errors: float16 rounds to 5e-4 of a number's size, and an error of 1 is as large as the output.
BOUNDS = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
# float16's smallest normal number: an output that is smaller throughout has no digits there, and no error is large beside it.
LEAST_SCALE = 2.0**-14
# What a reference's size still counts after each further run: half of it after 69.
SCALE_MEMORY = 0.99


@dataclass(frozen=True, slots=True)
class Distance:
    """One answer's distance from the reference.

    Attributes:
        error: the largest |answer - reference| where both are finite; infinite where one of them is and the other is not, or
            where both are infinite with different signs.
        scale: the largest finite |reference|; 0 where there is none.
        rows: that choose between classes; elements, where the numbers are not floating.
        agreeing: those of them that choose alike.
    """

    error: float
    scale: float
    rows: int
    agreeing: int


def compare(answer: Array, reference: Array) -> Distance:
    """The distance between two arrays of one shape; the reference is as wide or wider.

    Raises:
        ValueError: the shapes differ.
    """
    if answer.shape != reference.shape:
        raise ValueError(f"the answer has shape {list(answer.shape)}, the fp32 twin's {list(reference.shape)}")
    if not _floating(answer):
        return Distance(0.0, 0.0, answer.size, int(np.count_nonzero(answer == reference)))
    with np.errstate(invalid="ignore"):  # a cast of some NaNs says so
        a, r = answer.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(r)
    both = finite & np.isfinite(a)
    scale = float(np.abs(r[finite]).max(initial=0.0))
    error = float(np.abs(a[both] - r[both]).max(initial=0.0))
    # NaN against NaN, and an infinity against the same one, is no difference.
    unequal = ~both & (a != r) & ~(np.isnan(a) & np.isnan(r))
    if unequal.any():
        error = math.inf
    rows, agreeing = _agreement(a, r, answer)
    return Distance(error, scale, rows, agreeing)


def _floating(array: Array) -> bool:
    return array.dtype.kind == "f" or str(array.dtype.name) == "bfloat16"


def _agreement(answer: Array, reference: Array, narrow_like: Array) -> tuple[int, int]:
    """Rows, and those with the reference's argmax or one that the answer's dtype cannot tell from it.

    Classes lie along the last axis, and along axis 1 of images' (N, C, H, W).
    """
    axis = 1 if answer.ndim > 3 else -1
    if answer.ndim < 2 or answer.shape[axis] < 2 or not answer.size:
        return 0, 0
    a, r = np.moveaxis(answer, axis, -1), np.moveaxis(reference, axis, -1)
    chosen, wanted = a.argmax(-1)[..., None], r.argmax(-1)[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = r.astype(narrow_like.dtype)
    tied = np.take_along_axis(narrow, chosen, -1) == np.take_along_axis(narrow, wanted, -1)
    return chosen.size, int(np.count_nonzero((chosen == wanted) | tied))


@dataclass(slots=True)
class OutputDrift:
    """The drift of one output: a histogram over all shadow runs."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0
    rows: int = 0
    agreeing: int = 0
    _scale: float = 0.0

    def add(self, distance: Distance) -> float:
        """Record a run.

        Returns:
            Its error in units of the output's size, which is the largest reference of late: an answer that happens to be
            near 0 throughout would make any rounding look large.
        """
        self._scale = max(distance.scale, self._scale * SCALE_MEMORY)
        scaled = distance.error / max(self._scale, LEAST_SCALE)
        self.counts[bisect_left(BOUNDS, scaled)] += 1
        if math.isfinite(scaled):
            self.total += scaled
        self.rows += distance.rows
        self.agreeing += distance.agreeing
        return scaled

    def histogram(self) -> DriftHistogram:
        """As it is now."""
        return DriftHistogram(bounds=BOUNDS, counts=tuple(self.counts), total=self.total)
