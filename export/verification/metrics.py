"""How far one array is from another, in the figures that tell whether fp16 is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from export.certificate.figures import Figures, Kind, Vanished
from export.verification.choices import class_axis, joint_choices
from export.verification.columns import NOISE_FACTOR, Array, Yardstick, by_column, indices_of, learned, sums_to_one
from export.weight_ledger import FP16_SMALLEST_NORMAL

__all__ = ["Array", "compare", "compare_parts", "cosine", "non_finite_differences", "ulp_distance"]


def compare(reference: Array, candidate: Array, yardstick: Yardstick | None = None) -> Figures:
    """All figures for two arrays of one shape; see `compare_parts`.

    Raises:
        ValueError: The shapes differ.
    """
    return compare_parts([(reference, candidate)], yardstick)


def compare_parts(parts: Sequence[tuple[Array, Array]], yardstick: Yardstick | None = None) -> Figures:
    """All figures for the parts (reference, candidate) of one output, such as its batches, taken together, in float64.

    Args:
        parts: The arrays, of any type.
        yardstick: What errors are divided by; by default learned from these references.

    Raises:
        ValueError: There is no part, or the shapes of one differ.
    """
    if not parts:
        raise ValueError("there is nothing to compare")
    for reference, candidate in parts:
        if reference.shape != candidate.shape:
            raise ValueError(f"the candidate has shape {list(candidate.shape)}, the reference {list(reference.shape)}")
    yardstick = yardstick or learned([reference for reference, _ in parts])
    numbers = [_numbers(reference, candidate) for reference, candidate in parts]
    r_all, c_all = (np.concatenate(side) for side in zip(*numbers, strict=True))
    both = np.isfinite(r_all) & np.isfinite(c_all)
    r, c = r_all[both], c_all[both]
    error = np.abs(c - r)
    relative = error / np.maximum(np.abs(r), FP16_SMALLEST_NORMAL)
    choices = joint_choices(parts, yardstick)
    floating = all(np.issubdtype(reference.dtype, np.floating) for reference, _ in parts)
    kinds = _kinds_compared(parts, yardstick)
    choosing = yardstick.kind_of_choices if kinds else None
    return Figures(
        elements=r_all.size,
        scale=_max(np.abs(r_all[np.isfinite(r_all)])),
        max_abs_error=_max(error),
        mean_abs_error=_mean(error),
        max_rel_error=_max(relative),
        mean_rel_error=_mean(relative),
        max_scaled_error=max((kind.max_scaled_error for kind in kinds), default=_max(error) / yardstick.unit),
        max_ulp=_max(ulp_distance(r, c)),
        cosine=cosine(r, c),
        non_finite=non_finite_differences(r_all, c_all),
        agreement=None if choices is None else choices.agreement,
        floating=floating,
        rows=0 if choices is None else choices.rows,
        differing=0 if choices is None else choices.differing,
        margin=0.0 if choices is None else choices.margin,
        unit=yardstick.unit if choosing is None else choosing.unit,
        axis=yardstick.axis if kinds else None,
        kinds=kinds,
        vanished=_vanished(parts, yardstick, r, c) if floating else None,
        constant_rows=0 if choices is None else choices.constant,
        noise=yardstick.largest_noise,
    )


def _kinds_compared(parts: Sequence[tuple[Array, Array]], yardstick: Yardstick) -> tuple[Kind, ...]:
    """The kinds with their largest errors; none where an array is not as those that they were learned from."""
    axis = yardstick.axis
    if axis is None or not all(yardstick.fits(reference) for reference, _ in parts):
        return ()
    errors = np.max([_column_errors(by_column(r, axis), by_column(c, axis)) for r, c in parts], axis=0)
    found: list[Kind] = []
    for kind in yardstick.kinds:
        columns = indices_of(kind)
        worst = int(columns[np.nanargmax(np.where(np.isnan(errors[columns]), -1.0, errors[columns]))])
        found.append(replace(kind, max_abs_error=float(np.nan_to_num(errors[worst])), worst=worst))
    return tuple(found)


def _column_errors(reference: Array, candidate: Array) -> Array:
    """The largest error of each column where both are finite; 0 where nothing is."""
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    both = np.isfinite(r) & np.isfinite(c)
    with np.errstate(invalid="ignore"):  # two infinities
        errors: Array = np.where(both, np.abs(c - r), 0.0).max(axis=0, initial=0.0)
    return errors


def _vanished(parts: Sequence[tuple[Array, Array]], yardstick: Yardstick, r: Array, c: Array) -> Vanished | None:
    """What is 0 throughout in the candidate alone: the output, or columns most of whose reference values are not 0.

    Columns of probabilities whose sum is 1 may: a class that no sample belongs to is no part of the answer. So may what the
    reference has by rounding alone, which is within its own noise.
    """
    known = 2 * NOISE_FACTOR * yardstick.largest_noise
    if r.size and not c.any() and _max(np.abs(r)) > known:
        return Vanished(axis=None, columns=1, first=0, largest=_max(np.abs(r)))
    ndim = parts[0][0].ndim
    axis = class_axis(ndim) if yardstick.axis is None else yardstick.axis
    sizes = {reference.shape[axis] if reference.ndim == ndim else 0 for reference, _ in parts} if ndim > 1 else set()
    if len(sizes) != 1 or 0 in sizes or sum(reference.size for reference, _ in parts) < 2 * sizes.pop():
        return None
    references = [np.nan_to_num(by_column(reference, axis)) for reference, _ in parts]
    present = np.mean(np.concatenate([np.atleast_2d((table != 0).mean(axis=0)) for table in references if len(table)]), axis=0)
    gone = ~np.any([by_column(candidate, axis).any(axis=0) for _, candidate in parts], axis=0) & (present > 1 / 2)
    if not gone.any():
        return None
    magnitudes = np.max([np.abs(table).max(axis=0, initial=0.0) for table in references], axis=0)
    gone &= magnitudes > known
    shares = np.flatnonzero(np.all([((table >= 0) & (table <= 1)).all(axis=0) for table in references], axis=0))
    if len(shares) and sums_to_one([reference for reference, _ in parts], axis, shares):
        gone[shares] = False
    columns = np.flatnonzero(gone)
    if not len(columns):
        return None
    return Vanished(axis=axis, columns=len(columns), first=int(columns[0]), largest=float(magnitudes[columns].max()))


def ulp_distance(a: Array, b: Array) -> Array:
    """How many float16 steps lie between two arrays, elementwise, after rounding both to float16; int64.

    Signed numbers are mapped to integers in their order, so that -0 and 0 are one and the step over 0 counts as one.
    """
    distance: Array = np.abs(_ordered(a) - _ordered(b))
    return distance


def non_finite_differences(reference: Array, candidate: Array) -> int:
    """Places where the two differ in being NaN, +inf, -inf or finite. What the reference has too is not counted."""
    same_infinity = np.isinf(reference) & (reference == candidate)
    same_nan = np.isnan(reference) & np.isnan(candidate)
    either = ~np.isfinite(reference) | ~np.isfinite(candidate)
    return int((either & ~same_infinity & ~same_nan).sum())


def cosine(a: Array, b: Array) -> float:
    """Cosine of the angle between two flat arrays; 1 for two zero vectors, 0 for one, NaN for empty ones."""
    if a.size == 0:
        return float("nan")
    largest_a, largest_b = _max(np.abs(a)), _max(np.abs(b))
    if largest_a == 0 or largest_b == 0:
        return float(largest_a == largest_b)
    a, b = a / largest_a, b / largest_b  # so that squares neither overflow nor vanish
    return float(np.clip(np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def _numbers(reference: Array, candidate: Array) -> tuple[Array, Array]:
    """Both flat and float64; texts become 0, and 1 where they differ."""
    if reference.dtype.kind in "biuf" and candidate.dtype.kind in "biuf":
        return reference.astype(np.float64).ravel(), candidate.astype(np.float64).ravel()
    return np.zeros(reference.size), np.asarray(reference != candidate, np.float64).ravel()


def _ordered(values: Array) -> Array:
    with np.errstate(over="ignore"):
        bits = values.astype(np.float16).view(np.int16).astype(np.int64)
    return np.where(bits < 0, -0x8000 - bits, bits)


def _max(values: Array) -> float:
    return float(values.max()) if values.size else float("nan")


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else float("nan")
