"""How far one array is from another, in the figures that tell whether fp16 is good enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from export.certificate.figures import Figures
from export.weight_ledger import FP16_SMALLEST_NORMAL

Array: TypeAlias = np.ndarray[Any, Any]


def compare(reference: Array, candidate: Array) -> Figures:
    """All figures for two arrays of one shape, computed in float64.

    Raises:
        ValueError: The shapes differ.
    """
    return compare_parts([(reference, candidate)])


def compare_parts(parts: Sequence[tuple[Array, Array]]) -> Figures:
    """All figures for the parts (reference, candidate) of one output, such as its batches, taken together.

    Raises:
        ValueError: There is no part, or the shapes of one differ.
    """
    if not parts:
        raise ValueError("there is nothing to compare")
    for reference, candidate in parts:
        if reference.shape != candidate.shape:
            raise ValueError(f"the candidate has shape {list(candidate.shape)}, the reference {list(reference.shape)}")
    numbers = [_numbers(reference, candidate) for reference, candidate in parts]
    r_all, c_all = (np.concatenate(side) for side in zip(*numbers, strict=True))
    both = np.isfinite(r_all) & np.isfinite(c_all)
    r, c = r_all[both], c_all[both]
    error = np.abs(c - r)
    relative = error / np.maximum(np.abs(r), FP16_SMALLEST_NORMAL)
    finite = np.abs(r_all[np.isfinite(r_all)])
    scale = _max(finite)
    choices = _joint_choices(parts)
    return Figures(
        elements=r_all.size,
        scale=scale,
        max_abs_error=_max(error),
        mean_abs_error=_mean(error),
        max_rel_error=_max(relative),
        mean_rel_error=_mean(relative),
        max_scaled_error=_max(error) / max(scale, FP16_SMALLEST_NORMAL) if math.isfinite(scale) else _max(error),
        max_ulp=_max(ulp_distance(r, c)),
        cosine=cosine(r, c),
        non_finite=non_finite_differences(r_all, c_all),
        agreement=None if choices is None else choices.agreement,
        floating=all(np.issubdtype(reference.dtype, np.floating) for reference, _ in parts),
        rows=0 if choices is None else choices.rows,
        differing=0 if choices is None else choices.differing,
        margin=0.0 if choices is None else choices.margin,
    )


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


def argmax_agreement(reference: Array, candidate: Array) -> float:
    """Share of rows in which both choose the same class.

    Classes lie along the last axis of (N, C) and (N, T, C) arrays, and along axis 1 of (N, C, H, W) ones. A choice counts as
    the same too when the reference's numbers for the two classes are equal after rounding to float16: no fp16 model can tell
    them apart.
    """
    return _argmax_choices(reference, candidate).agreement


@dataclass(frozen=True)
class _Choices:
    """How many rows there are, how many do not agree, and what the reference's choices there are ahead by at most."""

    rows: int
    differing: int
    margin: float = 0.0

    @property
    def agreement(self) -> float:
        return (self.rows - self.differing) / self.rows if self.rows else float("nan")


def _argmax_choices(reference: Array, candidate: Array) -> _Choices:
    axis = 1 if reference.ndim > 3 else -1
    r, c = np.moveaxis(reference, axis, -1), np.moveaxis(candidate, axis, -1)
    if r[..., 0].size == 0:
        return _Choices(0, 0)
    chosen, wanted = c.argmax(-1)[..., None], r.argmax(-1)[..., None]
    with np.errstate(over="ignore"):
        narrow = r.astype(np.float16)
    best, other = np.take_along_axis(narrow, wanted, -1), np.take_along_axis(narrow, chosen, -1)
    tied = (best == other) & np.isfinite(best)
    usable = np.isnan(r).any(-1, keepdims=True) == np.isnan(c).any(-1, keepdims=True)
    differing = ~(((chosen == wanted) | tied) & usable)
    ahead = _ahead(r, wanted, chosen)[differing & usable]
    margin = math.inf if (differing & ~usable).any() or not np.isfinite(ahead).all() else float(ahead.max(initial=0.0))
    return _Choices(differing.size, int(differing.sum()), margin)


def _ahead(reference: Array, wanted: Array, chosen: Array) -> Array:
    """By how much each row's largest number is above the one that the candidate has chosen."""
    with np.errstate(invalid="ignore"):  # two infinities
        best, other = (np.take_along_axis(reference, places, -1).astype(np.float64) for places in (wanted, chosen))
        difference: Array = best - other
    return difference


def _numbers(reference: Array, candidate: Array) -> tuple[Array, Array]:
    """Both flat and float64; texts become 0, and 1 where they differ."""
    if reference.dtype.kind in "biuf" and candidate.dtype.kind in "biuf":
        return reference.astype(np.float64).ravel(), candidate.astype(np.float64).ravel()
    return np.zeros(reference.size), np.asarray(reference != candidate, np.float64).ravel()


def _joint_choices(parts: Sequence[tuple[Array, Array]]) -> _Choices | None:
    """Those of all parts; None where there is nothing to choose between."""
    found = [_choices(reference, candidate) for reference, candidate in parts]
    known = [choices for choices in found if choices is not None and choices.rows]
    if not known and any(choices is None for choices in found):
        return None
    margin = max((choices.margin for choices in known), default=0.0)
    return _Choices(sum(choices.rows for choices in known), sum(choices.differing for choices in known), margin)


def _choices(reference: Array, candidate: Array) -> _Choices | None:
    if not np.issubdtype(reference.dtype, np.floating):
        differing = int((reference != candidate).sum())
        return _Choices(reference.size, differing, math.inf if differing else 0.0)
    if reference.ndim < 2 or reference.shape[1 if reference.ndim > 3 else -1] < 2:
        return None
    return _argmax_choices(reference, candidate)


def _ordered(values: Array) -> Array:
    with np.errstate(over="ignore"):
        bits = values.astype(np.float16).view(np.int16).astype(np.int64)
    return np.where(bits < 0, -0x8000 - bits, bits)


def _max(values: Array) -> float:
    return float(values.max()) if values.size else float("nan")


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else float("nan")
