"""Error metrics of two arrays, and whether two models choose the same class, row by row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from halfserve.export.certificate.budget import ColumnKind, ErrorFigures, Vanished
from halfserve.export.half_types import FP16, FP16_SMALLEST_NORMAL, HalfName, HalfType
from halfserve.export.verification.error_units import (
    NOISE_FACTOR,
    ErrorUnits,
    by_column,
    indices_of,
    learned_units,
    sums_to_one,
)
from halfserve.export.verification.samples import Array

# Within a kind of columns, a lead below this many units is a tie, since errors of that size are allowed by default.
NEAR: dict[HalfName, float] = {"float16": 2.0**-7, "bfloat16": 2.0**-5}


def compare(reference: Array, candidate: Array, units: ErrorUnits | None = None) -> ErrorFigures:
    """Compute all figures of two arrays of one shape; see `compare_parts`.

    Raises:
        ValueError: The shapes differ.
    """
    return compare_parts([(reference, candidate)], units)


def compare_parts(parts: Sequence[tuple[Array, Array]], units: ErrorUnits | None = None) -> ErrorFigures:
    """Compute all figures of one output from its parts (reference, candidate), such as batches, in float64.

    Errors are divided by `units`, by default those learned from these references.

    Raises:
        ValueError: There is no part, or the shapes of one differ.
    """
    if not parts:
        raise ValueError("there is nothing to compare")
    for reference, candidate in parts:
        if reference.shape != candidate.shape:
            raise ValueError(f"the candidate has shape {list(candidate.shape)}, the reference {list(reference.shape)}")
    units = units or learned_units([reference for reference, _ in parts])
    numbers = [_numbers(reference, candidate) for reference, candidate in parts]
    r_all, c_all = (np.concatenate(side) for side in zip(*numbers, strict=True))
    both = np.isfinite(r_all) & np.isfinite(c_all)
    r, c = r_all[both], c_all[both]
    error = np.abs(c - r)
    relative = error / np.maximum(np.abs(r), FP16_SMALLEST_NORMAL)
    choices = joint_choices(parts, units) or Choices(0, 0)
    floating = all(np.issubdtype(reference.dtype, np.floating) for reference, _ in parts)
    kinds = _kinds_compared(parts, units)
    choosing = units.kind_of_choices if kinds else None
    return ErrorFigures(
        elements=r_all.size,
        scale=_max(np.abs(r_all[np.isfinite(r_all)])),
        max_abs_error=_max(error),
        mean_abs_error=_mean(error),
        max_rel_error=_max(relative),
        mean_rel_error=_mean(relative),
        max_scaled_error=max((kind.max_scaled_error for kind in kinds), default=_max(error) / units.unit),
        max_ulp=_max(ulp_distance(r, c, units.half)),
        cosine=cosine(r, c),
        non_finite=non_finite_differences(r_all, c_all),
        agreement=choices.agreement,
        floating=floating,
        rows=choices.rows,
        differing=choices.differing,
        margin=choices.margin,
        unit=units.unit if choosing is None else choosing.unit,
        axis=units.axis if kinds else None,
        kinds=kinds,
        vanished=_vanished(parts, units, r, c) if floating else None,
        constant_rows=choices.constant,
        commonest=choices.commonest,
        nan_rows=sum(_rows_with_nan(reference) for reference, _ in parts) if floating else 0,
        all_rows=sum(_rows(reference) for reference, _ in parts) if floating else 0,
        noise=units.largest_noise,
    )


def _rows(reference: Array) -> int:
    return reference.size // max(1, reference.shape[class_axis(reference.ndim)] if reference.ndim > 1 else 1)


def _rows_with_nan(reference: Array) -> int:
    missing = np.isnan(reference)
    return int((missing.any(class_axis(reference.ndim)) if reference.ndim > 1 else missing).sum())


def _kinds_compared(parts: Sequence[tuple[Array, Array]], units: ErrorUnits) -> tuple[ColumnKind, ...]:
    """Return the kinds with their largest errors; none where an array does not fit the units."""
    axis = units.axis
    if axis is None or not all(units.fits(reference) for reference, _ in parts):
        return ()
    errors = np.max([_column_errors(by_column(r, axis), by_column(c, axis)) for r, c in parts], axis=0)
    found: list[ColumnKind] = []
    for kind in units.kinds:
        columns = indices_of(kind)
        worst = int(columns[np.nanargmax(np.where(np.isnan(errors[columns]), -1.0, errors[columns]))])
        found.append(replace(kind, max_abs_error=float(np.nan_to_num(errors[worst])), worst=worst))
    return tuple(found)


def _column_errors(reference: Array, candidate: Array) -> Array:
    """Return the largest error of each column where both are finite; 0 in a column without such a place."""
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    both = np.isfinite(r) & np.isfinite(c)
    with np.errstate(invalid="ignore"):  # two infinities
        errors: Array = np.where(both, np.abs(c - r), 0.0).max(axis=0, initial=0.0)
    return errors


def _vanished(parts: Sequence[tuple[Array, Array]], units: ErrorUnits, r: Array, c: Array) -> Vanished | None:
    """Find what is 0 in the candidate only: the whole output, or columns whose reference values mostly are not 0.

    Excluded are columns of a probability distribution, since a class without samples may vanish, and values within the
    reference's own noise.
    """
    known = 2 * NOISE_FACTOR * units.largest_noise
    if r.size and not c.any() and _max(np.abs(r)) > known:
        return Vanished(axis=None, columns=1, first=0, largest=_max(np.abs(r)))
    ndim = parts[0][0].ndim
    axis = class_axis(ndim) if units.axis is None else units.axis
    sizes = {reference.shape[axis] if reference.ndim == ndim else 0 for reference, _ in parts} if ndim > 1 else set()
    if len(sizes) != 1 or 0 in sizes or sum(reference.size for reference, _ in parts) < 2 * sizes.pop():
        return None
    references = [np.nan_to_num(by_column(reference, axis)) for reference, _ in parts]
    present = np.mean(np.concatenate([np.atleast_2d((table != 0).mean(axis=0)) for table in references if len(table)]), axis=0)
    vanished = ~np.any([by_column(candidate, axis).any(axis=0) for _, candidate in parts], axis=0) & (present > 1 / 2)
    if not vanished.any():
        return None
    magnitudes = np.max([np.abs(table).max(axis=0, initial=0.0) for table in references], axis=0)
    vanished &= magnitudes > known
    shares = np.flatnonzero(np.all([((table >= 0) & (table <= 1)).all(axis=0) for table in references], axis=0))
    if len(shares) and sums_to_one([reference for reference, _ in parts], axis, shares):
        vanished[shares] = False
    columns = np.flatnonzero(vanished)
    if not len(columns):
        return None
    return Vanished(axis=axis, columns=len(columns), first=int(columns[0]), largest=float(magnitudes[columns].max()))


def ulp_distance(a: Array, b: Array, half: HalfType = FP16) -> Array:
    """Distance in steps of the half type, elementwise as int64, after rounding both arrays to it; -0 and 0 are equal."""
    distance: Array = np.abs(_ordered(a, half) - _ordered(b, half))
    return distance


def non_finite_differences(reference: Array, candidate: Array) -> int:
    """Count places where the two differ in being NaN, +inf, -inf or finite."""
    same_infinity = np.isinf(reference) & (reference == candidate)
    same_nan = np.isnan(reference) & np.isnan(candidate)
    either = ~np.isfinite(reference) | ~np.isfinite(candidate)
    return int((either & ~same_infinity & ~same_nan).sum())


def cosine(a: Array, b: Array) -> float:
    """Cosine similarity of two flat arrays; 1 for two zero vectors, 0 for one, NaN for empty arrays."""
    if a.size == 0:
        return float("nan")
    largest_a, largest_b = _max(np.abs(a)), _max(np.abs(b))
    if largest_a == 0 or largest_b == 0:
        return float(largest_a == largest_b)
    a, b = a / largest_a, b / largest_b  # so that squares neither overflow nor vanish
    return float(np.clip(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def _numbers(reference: Array, candidate: Array) -> tuple[Array, Array]:
    """Return both arrays flat and in float64; text becomes 0 in the reference, and 1 in the candidate where it differs."""
    if reference.dtype.kind in "biuf" and candidate.dtype.kind in "biuf":
        return reference.astype(np.float64).ravel(), candidate.astype(np.float64).ravel()
    return np.zeros(reference.size), np.asarray(reference != candidate, np.float64).ravel()


def _ordered(values: Array, half: HalfType) -> Array:
    bits = half.narrowed(values).view(np.int16).astype(np.int64)
    return np.where(bits < 0, -0x8000 - bits, bits)


def _max(values: Array) -> float:
    return float(values.max()) if values.size else float("nan")


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else float("nan")


@dataclass(frozen=True)
class Choices:
    """Agreement of two models' choices.

    Attributes:
        rows: Rows in which the reference prefers a class; those in which both hold NaN are left out.
        differing: Rows that disagree.
        margin: The largest lead of the reference's choice over the disagreeing rows.
        constant: Rows without evidence: the reference prefers no class, makes the same choice in all rows, or answers all
            samples alike.
        chosen: The number of `rows` in which the reference chooses each class; empty for outputs that are not floats.
    """

    rows: int
    differing: int
    margin: float = 0.0
    constant: int = 0
    chosen: Mapping[int, int] = field(default_factory=dict)

    @property
    def commonest(self) -> int:
        """In how many of `rows` the reference makes its most frequent choice."""
        return max(self.chosen.values(), default=0)

    @property
    def agreement(self) -> float | None:
        return (self.rows - self.differing) / self.rows if self.rows else None


def class_axis(ndim: int) -> int:
    """Return the axis of classes: 1 in arrays of more than 3 dimensions such as (N, C, H, W), else the last, as in
    (N, T, C).
    """
    return 1 if ndim > 3 else ndim - 1


def argmax_agreement(reference: Array, candidate: Array) -> float | None:
    """Share of rows in which both choose the same class; None where the reference prefers no class in any row.

    Two classes whose numbers in the reference are equal after rounding to float16 count as one choice, since no fp16 model can
    distinguish them. Rows in which all classes are equal in this sense are left out.
    """
    return _argmax_choices(reference, candidate, tie=0.0).agreement


def joint_choices(parts: Sequence[tuple[Array, Array]], units: ErrorUnits) -> Choices | None:
    """Agreement over all parts; None where no row has a choice."""
    found = [_choices(reference, candidate, units) for reference, candidate in parts]
    known = [choices for choices in found if choices is not None and choices.rows + choices.constant]
    if not known and any(choices is None for choices in found):
        return None
    margin = max((choices.margin for choices in known), default=0.0)
    rows, differing, constant = (sum(getattr(c, name) for c in known) for name in ("rows", "differing", "constant"))
    chosen: Counter[int] = sum((Counter(choices.chosen) for choices in known), Counter())
    one_class = rows > 1 and len(chosen) == 1  # a model that always chooses it agrees as well
    if not differing and (one_class or _alike([reference for reference, _ in parts], units.half)):
        return Choices(0, 0, 0.0, rows + constant)
    return Choices(rows, differing, margin, constant, chosen)


def _alike(references: Sequence[Array], half: HalfType) -> bool:
    """Return whether the reference answers at least two samples, all equally after rounding to the half type."""
    if not all(reference.dtype.kind == "f" for reference in references) or sum(map(len, references)) < 2:
        return False
    first = next(reference[:1] for reference in references if len(reference))
    same = half.narrowed(first)
    rounded = (half.narrowed(reference) for reference in references)
    return all(each.shape[1:] == same.shape[1:] and bool((each == same).all()) for each in rounded)


def _choices(reference: Array, candidate: Array, units: ErrorUnits) -> Choices | None:
    if not np.issubdtype(reference.dtype, np.floating):
        differing = int((reference != candidate).sum())
        return Choices(reference.size, differing, math.inf if differing else 0.0)
    tie = NOISE_FACTOR * units.largest_noise
    kind = units.kind_of_choices
    if kind is not None and units.axis is not None and units.fits(reference):
        columns = indices_of(kind)
        if len(columns) < 2:
            return None
        wanted, got = (np.moveaxis(array, units.axis, -1)[..., columns] for array in (reference, candidate))
        tie = max(NEAR[units.half.name] * kind.unit, tie)
        return _argmax_choices(wanted, got, tie=tie, axis=-1, half=units.half)
    if reference.ndim < 2 or reference.shape[class_axis(reference.ndim)] < 2:
        return None
    return _argmax_choices(reference, candidate, tie=tie, half=units.half)


def _argmax_choices(
    reference: Array, candidate: Array, *, tie: float, axis: int | None = None, half: HalfType = FP16
) -> Choices:
    axis = class_axis(reference.ndim) if axis is None else axis
    r, c = np.moveaxis(reference, axis, -1), np.moveaxis(candidate, axis, -1)
    if r[..., 0].size == 0:
        return Choices(0, 0)
    wanted = r.argmax(-1)[..., None]
    constant = (c == c[..., :1]).all(-1, keepdims=True)  # argmax would return the first class
    chosen = np.where(constant, r.argmin(-1)[..., None], c.argmax(-1)[..., None])
    tied = _tied(r, wanted, chosen, tie, half)
    missing, lost = (np.isnan(side).any(-1, keepdims=True) for side in (r, c))
    known, usable = ~(missing & lost), missing == lost
    telling = known & ~(_tied(r, wanted, r.argmin(-1)[..., None], tie, half) & usable)
    differing = ~(((chosen == wanted) | tied) & usable) & telling
    ahead = _ahead(r, wanted, chosen)[differing & usable]
    margin = math.inf if (differing & ~usable).any() or not np.isfinite(ahead).all() else float(ahead.max(initial=0.0))
    chosen = Counter(wanted[telling].tolist())
    return Choices(int(telling.sum()), int(differing.sum()), margin, int((known & ~telling).sum()), chosen)


def _tied(reference: Array, wanted: Array, chosen: Array, tie: float, half: HalfType) -> Array:
    """Return where the reference's two numbers are equal after rounding to the half type, or closer than `tie`."""
    narrow = half.narrowed(reference)
    best, other = np.take_along_axis(narrow, wanted, -1), np.take_along_axis(narrow, chosen, -1)
    tied: Array = ((best == other) & np.isfinite(best)) | (_ahead(reference, wanted, chosen) < tie)
    return tied


def _ahead(reference: Array, wanted: Array, chosen: Array) -> Array:
    """Lead of each row's largest number over the number at the candidate's choice."""
    with np.errstate(invalid="ignore"):  # two infinities
        best, other = (np.take_along_axis(reference, places, -1).astype(np.float64) for places in (wanted, chosen))
        difference: Array = best - other
    return difference
