"""Errors of an output, column by column, each relative to the size of numbers in similar columns.

Relative to the largest value of the whole output, one column of large numbers hides every error in the others. A column is an
index along one axis of the output. As in a certificate's verdict, columns of about one size are judged together, because one
of them may happen to be near 0: sorted by size, two neighbours belong to different kinds if their sizes differ by a factor of
GAP. Shares (all values in [0, 1]) and log-probabilities are one kind each, because a rare class has tiny numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from halfserve.serve.engine.precision_guard.tally import LEAST_SCALE
from halfserve.serve.engine.tensors import Array

GAP = 16.0
FAR = 4096.0  # replaces GAP if columns have fewer than FEWEST_VALUES values
FEWEST_VALUES = 8
TINY = 32.0  # the scale of numbers below LEAST_SCALE is at most 32 times their size
SUM_TOLERANCE = 1e-3

Label = TypeVar("Label")


@dataclass(frozen=True)
class ColumnError(Generic[Label]):
    """The largest error of an output.

    Attributes:
        relative: |answer - reference| divided by `scale`; infinite if only one of them is finite.
        scale: the largest |reference| in columns of the same kind.
        axis: axis along which the columns lie; 0 if the output is one column.
        column: index along that axis.
        label: label of the compared pair with this error.
    """

    relative: float
    scale: float
    axis: int
    column: int
    label: Label


class OutputErrors(Generic[Label]):
    """Collects the errors of one floating output over several answers."""

    def __init__(self, open_axes: Collection[int]) -> None:
        """`open_axes`: axes along which the answers differ in size, so that their indices are no columns."""
        self._open = frozenset(open_axes)
        self._columns: dict[tuple[int, int], _Columns[Label]] = {}  # keys: axis and its size

    def add(self, reference: Array, answer: Array, label: Label) -> None:
        """Compare an answer of shape [rows, ...] with its reference of the same shape."""
        dtype = np.float64 if reference.dtype == np.float64 else np.float32
        r: Array = reference.astype(dtype, copy=False)
        a: Array = answer.astype(dtype, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):
            errors: Array = np.abs(np.subtract(a, r))
        if not np.isfinite(errors).all():
            same = (a == r) | (np.isnan(a) & np.isnan(r))
            errors = np.where(same, 0, np.where(np.isfinite(errors), errors, np.inf))
        for axis in [axis for axis in range(1, r.ndim) if axis not in self._open] or [0]:
            size = r.shape[axis] if axis else 1
            columns = self._columns.setdefault((axis, size), _Columns(size))
            columns.add(_by_column(r, axis, size), _by_column(errors, axis, size), label)

    def worst(self) -> ColumnError[Label] | None:
        """Return the largest relative error so far, with the columns' sizes known so far; None without any column."""
        found = [columns.worst(axis) for (axis, _), columns in self._columns.items() if columns.has_values]
        return max(found, key=lambda error: error.relative, default=None)


def _by_column(array: Array, axis: int, size: int) -> Array:
    """Return the array as a table [places, columns]."""
    return array.reshape(-1, 1) if not axis else np.moveaxis(array, axis, -1).reshape(-1, size)


class _Columns(Generic[Label]):
    """Ranges, errors and labels of the columns along one axis."""

    def __init__(self, size: int) -> None:
        self._low, self._high = np.full(size, np.inf), np.full(size, -np.inf)
        self._errors = np.zeros(size)
        self._labels: list[Label] = []
        self._places = np.zeros(size, np.int64)  # index in `_labels` of the pair with each column's error
        self._values = 0
        self._are_logs = True

    @property
    def has_values(self) -> bool:
        return bool(self._labels)

    def add(self, reference: Array, errors: Array, label: Label) -> None:
        if not reference.size:
            return
        finite = np.isfinite(reference)
        self._low = np.minimum(self._low, np.where(finite, reference, np.inf).min(axis=0))
        self._high = np.maximum(self._high, np.where(finite, reference, -np.inf).max(axis=0))
        self._values += len(reference)
        self._are_logs = self._are_logs and _are_log_probabilities(reference)
        largest = errors.max(axis=0)
        self._places[largest > self._errors] = len(self._labels)
        self._labels.append(label)
        self._errors = np.maximum(self._errors, largest)

    def worst(self, axis: int) -> ColumnError[Label]:
        scales = self._scales()
        relative = self._errors / scales
        column = int(relative.argmax())
        label = self._labels[self._places[column]]
        return ColumnError(float(relative[column]), float(scales[column]), axis, column, label)

    def _scales(self) -> Array:
        """Return the scale of each column: the largest size in its kind. A column of zeros belongs to the kind with the most
        columns.
        """
        sizes = np.where(self._low <= self._high, np.maximum(np.abs(self._low), np.abs(self._high)), 0.0)
        are_shares = (self._low >= 0) & (self._high <= 1) & (sizes > 0)
        sizes[are_shares] = sizes[are_shares].max(initial=0.0)
        order = np.argsort(-sizes, kind="stable")
        ranked = sizes[order]
        ranked = ranked[: np.count_nonzero(ranked)]
        if not len(ranked):
            return np.full(len(sizes), LEAST_SCALE)
        gap = GAP if self._values >= FEWEST_VALUES else FAR
        begins = np.concatenate([[True], (ranked[:-1] >= gap * ranked[1:]) & (not self._are_logs)])
        kinds = np.cumsum(begins) - 1
        units = ranked[begins]
        units = np.maximum(units, np.minimum(LEAST_SCALE, TINY * units))
        scales = np.full(len(sizes), units[np.bincount(kinds).argmax()])
        scales[order[: len(ranked)]] = units[kinds]
        return scales


def _are_log_probabilities(table: Array) -> bool:
    """Return whether the columns of every place are the logarithms of a distribution."""
    if table.shape[1] < 2 or not table.max(initial=-np.inf) <= SUM_TOLERANCE:
        return False
    return bool(np.allclose(np.exp(table).sum(axis=1), 1, atol=SUM_TOLERANCE))
