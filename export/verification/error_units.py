"""The unit of an output's errors, and the kinds of columns that need units of their own.

A detector answers [B, N, 22] with boxes in hundreds beside scores below one; errors there have no common unit. Kinds of
columns are learned from the reference's answers to all samples. A column is an index along one axis other than the first,
which counts samples. Its magnitude is its largest finite |value|, its spread its largest minus its smallest value (its
magnitude, where it is constant).

Sorted by magnitude, columns split into two kinds where neighbours are at least a factor of `GAP` apart:

- clearly, where each column has at least `FEWEST_VALUES` values and the largest spreads on both sides differ by `GAP` too;
- vaguely, where the spreads do not (a constant may be smaller than another constant by chance), or where there are fewer
  values and the factor is `FAR`.

Shares, columns whose values all lie in [0, 1], are one kind, and so are log-probabilities: a class without samples has tiny
numbers and is a class like the others. Of several axes that separate kinds, the one with the widest gap is taken. Columns of
zeros join the kind with the most columns.

The unit of a kind is its magnitude or the following floor, whichever is larger, and at most the unit of the whole output:

- `min(2**-14, 32 * magnitude)`: below 2**-14 float16 loses digits, and a sigmoid's 4e-7 has seven steps; bfloat16 loses none
  down to 2**-126, which is the floor there;
- `min(1, 16 * spread)` for shares beside other kinds: 0.01 is a small error of a probability, but must not hide a small one;
- `16 * magnitude` for kinds that are separated vaguely.

With the default limit of 0.01, floors allow an error of at most 0.32 magnitudes, so a value that becomes 0 is always over
budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfserve.export.certificate.budget import ColumnKind, ErrorFigures
from halfserve.export.half_types import FP16, HalfType
from halfserve.export.verification.samples import Array

GAP = 16.0
FAR = 4096.0
FEWEST_VALUES = 8
FLOOR_EXTENTS = 16.0
TINY_EXTENTS = 32.0
NOISE_FACTOR = 2.0
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ErrorUnits:
    """Divisors of one output's errors.

    Attributes:
        scale: The reference's largest finite magnitude; NaN where nothing is finite.
        unit: Unit of the whole output.
        axis: The axis that separates kinds; None where the output is one kind.
        kinds: The kinds, largest scale first; empty where the output is one kind.
        noise: Noise of the reference per kind, or of the whole output in a tuple of one; empty where it was not measured.
        half: The half-precision type whose errors are measured.
    """

    scale: float
    unit: float
    axis: int | None = None
    kinds: tuple[ColumnKind, ...] = ()
    noise: tuple[float, ...] = ()
    half: HalfType = FP16

    @property
    def largest_noise(self) -> float:
        return max(self.noise, default=0.0)

    @property
    def kind_of_choices(self) -> ColumnKind | None:
        """The kind with the most columns; the argmax of a row is taken over it."""
        return max(self.kinds, key=lambda kind: len(indices_of(kind)), default=None)

    def fits(self, array: Array) -> bool:
        """Return whether an array has the axis and the columns of the kinds."""
        columns = sum(len(indices_of(kind)) for kind in self.kinds)
        return self.axis is not None and array.ndim > self.axis and array.shape[self.axis] == columns

    def for_other_samples(self, reference: Array) -> ErrorUnits:
        """Units for other samples than the learned ones: each at least the reference's magnitude there."""
        if not self.fits(reference):
            known = (self.unit, _largest(np.abs(reference)), *(kind.unit for kind in self.kinds))
            return replace(self, unit=max(known), axis=None, kinds=())
        magnitudes = by_column(np.abs(reference), self.axis or 0).max(axis=0, initial=0.0)
        largest = [float(np.nan_to_num(magnitudes[indices_of(kind)], nan=0.0, posinf=0.0).max()) for kind in self.kinds]
        kinds = (replace(kind, unit=max(kind.unit, size)) for kind, size in zip(self.kinds, largest, strict=True))
        return replace(self, kinds=tuple(kinds))


def recorded_units(figures: ErrorFigures, half: HalfType = FP16) -> ErrorUnits:
    """Return the units that figures were measured in."""
    return ErrorUnits(scale=figures.scale, unit=figures.unit, axis=figures.axis, kinds=figures.kinds, half=half)


def learned_units(parts: Sequence[Array], half: HalfType = FP16) -> ErrorUnits:
    """Learn the units of one output from the reference's answers to all batches."""
    values = [np.asarray(part, np.float64) for part in parts if part.dtype.kind in "biuf"]
    finite = [part[np.isfinite(part)] for part in values]
    filled = [part for part in finite if part.size]
    if not filled:
        return ErrorUnits(scale=float("nan"), unit=half.smallest_normal, half=half)
    low, high = min(float(part.min()) for part in filled), max(float(part.max()) for part in filled)
    scale = max(abs(low), abs(high))
    whole = ErrorUnits(scale=scale, unit=_floored(scale, TINY_EXTENTS * scale, half.smallest_normal), half=half)
    if not all(np.issubdtype(part.dtype, np.floating) for part in parts):
        return whole
    found = [(separated.gap, separated) for axis in _axes(values) if (separated := _separated(values, axis, whole))]
    if not found:
        return whole
    _, best = max(found, key=lambda entry: entry[0])
    return replace(whole, axis=best.axis, kinds=best.kinds)


def with_noise(units: ErrorUnits, noise: Sequence[float], limit: float, most: float) -> ErrorUnits:
    """Enlarge units so that the budget's `limit` allows `NOISE_FACTOR` times the reference's noise.

    Noise is given for each kind, or for the whole output in a sequence of one; more than `most` units of it are not allowed
    for. A kind whose noise exceeds half its scale is a remainder of larger numbers, and gets the unit of the whole output.
    """

    def raised(unit: float, own: float) -> float:
        return max(unit, NOISE_FACTOR * own / limit) if limit and own <= most * unit else unit

    counted = tuple(float(own) for own in noise)
    if not units.kinds:
        return replace(units, unit=raised(units.unit, counted[0]), noise=counted)
    kinds = (
        replace(kind, unit=units.unit if own > kind.scale / 2 else raised(kind.unit, own))
        for kind, own in zip(units.kinds, counted, strict=True)
    )
    return replace(units, kinds=tuple(kinds), noise=counted)


def indices_of(kind: ColumnKind) -> Array:
    return np.concatenate([np.arange(first, last + 1) for first, last in kind.columns])


def sums_to_one(parts: Sequence[Array], axis: int, columns: Array) -> bool:
    """Return whether columns hold a probability distribution: values in [0, 1] with a sum of 1 at every place."""
    for part in parts:
        rows = by_column(part, axis)[:, columns]
        if not ((rows >= 0) & (rows <= 1)).all() or not np.allclose(rows.sum(axis=1), 1, atol=_SUM_TOLERANCE):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class _Separated:
    """Kinds along one axis, and the widest gap between two of them."""

    axis: int
    kinds: tuple[ColumnKind, ...]
    gap: float


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One column, or all shares together."""

    columns: tuple[int, ...]
    magnitude: float
    spread: float
    shares: bool


def _axes(parts: Sequence[Array]) -> Iterator[int]:
    """Axes that may separate columns: not the first, and of one size in all batches."""
    ndims = {part.ndim for part in parts}
    for axis in range(1, ndims.pop() if len(ndims) == 1 else 0):
        sizes = {part.shape[axis] for part in parts}
        if len(sizes) == 1 and min(sizes) > 1 and sum(part.size for part in parts) > min(sizes):
            yield axis


def _separated(parts: Sequence[Array], axis: int, whole: ErrorUnits) -> _Separated | None:
    entries, zeros, count = _entries(parts, axis)
    groups: list[list[_Entry]] = []
    vague: list[bool] = []
    widest = 1.0
    for index, entry in enumerate(entries):
        gap = entries[index - 1].magnitude / entry.magnitude if index else 1.0
        if index and (gap < GAP or (count < FEWEST_VALUES and gap < FAR)):
            groups[-1].append(entry)
            continue
        groups.append([entry])
        clear = count >= FEWEST_VALUES and _spread(entries[:index]) >= GAP * _spread(entries[index:])
        vague.append(index > 0 and not clear)
        widest = max(widest, gap)
    if len(groups) < 2 or _log_probabilities(parts, axis):
        return None
    members = [sorted(column for entry in group for column in entry.columns) for group in groups]
    largest = max(range(len(groups)), key=lambda number: len(members[number]))
    members[largest] = sorted([*members[largest], *zeros])
    kinds = (_kind(columns, group, whole, vague=v) for columns, group, v in zip(members, groups, vague, strict=True))
    return _Separated(axis=axis, kinds=tuple(kinds), gap=widest)


def _kind(columns: Sequence[int], group: Sequence[_Entry], whole: ErrorUnits, *, vague: bool) -> ColumnKind:
    magnitude = max(entry.magnitude for entry in group)
    if vague:
        unit = FLOOR_EXTENTS * magnitude
    elif all(entry.shares for entry in group):
        unit = _floored(magnitude, FLOOR_EXTENTS * _spread(group), 1.0)
    else:
        unit = _floored(magnitude, TINY_EXTENTS * magnitude, whole.half.smallest_normal)
    return ColumnKind(columns=_ranges(columns), scale=magnitude, unit=min(unit, whole.unit))


def _floored(magnitude: float, extent: float, floor: float) -> float:
    """Return the larger of the magnitude and the floor, where the floor is at most the extent; the floor where both are 0."""
    return max(magnitude, min(floor, extent)) or floor


def _entries(parts: Sequence[Array], axis: int) -> tuple[list[_Entry], list[int], int]:
    """Return the columns by decreasing magnitude, the columns of zeros, and the count of values in each column."""
    tables = [by_column(part, axis) for part in parts]
    finite = [np.isfinite(table) for table in tables]
    lows = np.min([np.where(f, t, np.inf).min(axis=0, initial=np.inf) for t, f in zip(tables, finite, strict=True)], axis=0)
    highs = np.max([np.where(f, t, -np.inf).max(axis=0, initial=-np.inf) for t, f in zip(tables, finite, strict=True)], axis=0)
    magnitudes = np.where(lows <= highs, np.maximum(np.abs(lows), np.abs(highs)), 0.0)
    zeros = np.flatnonzero(magnitudes == 0)
    with np.errstate(invalid="ignore"):  # a column without a finite value
        spreads = np.where(highs > lows, highs - lows, magnitudes)
    shares = (lows >= 0) & (highs <= 1) & (magnitudes > 0)
    entries = [
        _Entry(columns=(int(j),), magnitude=float(magnitudes[j]), spread=float(spreads[j]), shares=False)
        for j in np.flatnonzero((magnitudes > 0) & ~shares)
    ]
    if shares.any():
        columns = tuple(int(j) for j in np.flatnonzero(shares))
        largest = float(magnitudes[shares].max()), float(spreads[shares].max())
        entries.append(_Entry(columns=columns, magnitude=largest[0], spread=largest[1], shares=True))
    entries.sort(key=lambda entry: -entry.magnitude)
    return entries, zeros.tolist(), sum(len(table) for table in tables)


def _log_probabilities(parts: Sequence[Array], axis: int) -> bool:
    tables = [by_column(part, axis) for part in parts]
    return all(
        (table <= _SUM_TOLERANCE).all() and np.allclose(np.exp(table).sum(axis=1), 1, atol=_SUM_TOLERANCE) for table in tables
    )


def by_column(part: Array, axis: int) -> Array:
    """Return the array as a table [places, columns], one column for each index along the axis."""
    table: Array = np.moveaxis(part, axis, -1).reshape(-1, part.shape[axis])
    return table


def _spread(entries: Sequence[_Entry]) -> float:
    return max((entry.spread for entry in entries), default=0.0)


def _largest(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 0.0


def _ranges(columns: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for column in columns:
        if ranges and ranges[-1][1] == column - 1:
            ranges[-1] = (ranges[-1][0], column)
        else:
            ranges.append((column, column))
    return tuple(ranges)
