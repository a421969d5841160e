"""Whether two models choose the same class, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from export.verification.columns import NOISE_FACTOR, Array, Yardstick, indices_of

# Where kinds of columns are told apart, a choice by less than this many units is none: errors as large are allowed.
NEAR = 2.0**-7


@dataclass(frozen=True)
class Choices:
    """How many rows there are, how many do not agree, and what the reference's choices there are ahead by at most.

    Attributes:
        rows: Rows in which the reference prefers one class to another.
        differing: How many of these do not agree.
        margin: By how much the reference prefers its choice, at most, over those.
        constant: Rows that say nothing: the reference prefers no class in them, or answers all samples alike.
    """

    rows: int
    differing: int
    margin: float = 0.0
    constant: int = 0

    @property
    def agreement(self) -> float | None:
        """Share of rows that agree; None where there is no row."""
        return (self.rows - self.differing) / self.rows if self.rows else None


def class_axis(ndim: int) -> int:
    """Where classes lie: along axis 1 of (N, C, H, W) arrays, along the last of (N, C) and (N, T, C) ones."""
    return 1 if ndim > 3 else ndim - 1


def argmax_agreement(reference: Array, candidate: Array) -> float | None:
    """Share of rows in which both choose the same class; None where the reference prefers none in any.

    A choice counts as the same too when the reference's numbers for the two classes are equal after rounding to float16: no
    fp16 model can tell them apart. Rows in which it has no other numbers at all are left out.
    """
    return _argmax_choices(reference, candidate, tie=0.0).agreement


def joint_choices(parts: Sequence[tuple[Array, Array]], yardstick: Yardstick) -> Choices | None:
    """Those of all parts; None where there is nothing to choose between."""
    found = [_choices(reference, candidate, yardstick) for reference, candidate in parts]
    known = [choices for choices in found if choices is not None and choices.rows + choices.constant]
    if not known and any(choices is None for choices in found):
        return None
    margin = max((choices.margin for choices in known), default=0.0)
    rows, differing, constant = (sum(getattr(c, name) for c in known) for name in ("rows", "differing", "constant"))
    if not differing and _alike([reference for reference, _ in parts]):
        return Choices(0, 0, 0.0, rows + constant)
    return Choices(rows, differing, margin, constant)


def _alike(references: Sequence[Array]) -> bool:
    """Whether the reference answers two samples or more, all alike as far as float16 tells."""
    if not all(reference.dtype.kind == "f" for reference in references) or sum(map(len, references)) < 2:
        return False
    first = next(reference[:1] for reference in references if len(reference))
    with np.errstate(over="ignore"):
        halves = (reference.astype(np.float16) for reference in references)
        return all(half.shape[1:] == first.shape[1:] and bool((half == first.astype(np.float16)).all()) for half in halves)


def _choices(reference: Array, candidate: Array, yardstick: Yardstick) -> Choices | None:
    if not np.issubdtype(reference.dtype, np.floating):
        differing = int((reference != candidate).sum())
        return Choices(reference.size, differing, math.inf if differing else 0.0)
    tie = NOISE_FACTOR * yardstick.largest_noise
    kind = yardstick.kind_of_choices
    if kind is not None and yardstick.axis is not None and yardstick.fits(reference):
        columns = indices_of(kind)
        if len(columns) < 2:
            return None
        wanted, got = (np.moveaxis(array, yardstick.axis, -1)[..., columns] for array in (reference, candidate))
        return _argmax_choices(wanted, got, tie=max(NEAR * kind.unit, tie), axis=-1)
    if reference.ndim < 2 or reference.shape[class_axis(reference.ndim)] < 2:
        return None
    return _argmax_choices(reference, candidate, tie=tie)


def _argmax_choices(reference: Array, candidate: Array, *, tie: float, axis: int | None = None) -> Choices:
    axis = class_axis(reference.ndim) if axis is None else axis
    r, c = np.moveaxis(reference, axis, -1), np.moveaxis(candidate, axis, -1)
    if r[..., 0].size == 0:
        return Choices(0, 0)
    wanted = r.argmax(-1)[..., None]
    constant = (c == c[..., :1]).all(-1, keepdims=True)  # then it prefers nothing, and its argmax is the first by convention
    chosen = np.where(constant, r.argmin(-1)[..., None], c.argmax(-1)[..., None])
    tied = _tied(r, wanted, chosen, tie)
    usable = np.isnan(r).any(-1, keepdims=True) == np.isnan(c).any(-1, keepdims=True)
    telling = ~(_tied(r, wanted, r.argmin(-1)[..., None], tie) & usable)
    differing = ~(((chosen == wanted) | tied) & usable) & telling
    ahead = _ahead(r, wanted, chosen)[differing & usable]
    margin = math.inf if (differing & ~usable).any() or not np.isfinite(ahead).all() else float(ahead.max(initial=0.0))
    return Choices(int(telling.sum()), int(differing.sum()), margin, int((~telling).sum()))


def _tied(reference: Array, wanted: Array, chosen: Array, tie: float) -> Array:
    """Where float16 cannot tell the reference's two numbers apart, or they are closer than `tie`."""
    with np.errstate(over="ignore"):
        narrow = reference.astype(np.float16)
    best, other = np.take_along_axis(narrow, wanted, -1), np.take_along_axis(narrow, chosen, -1)
    tied: Array = ((best == other) & np.isfinite(best)) | (_ahead(reference, wanted, chosen) < tie)
    return tied


def _ahead(reference: Array, wanted: Array, chosen: Array) -> Array:
    """By how much each row's largest number is above the one that the candidate has chosen."""
    with np.errstate(invalid="ignore"):  # two infinities
        best, other = (np.take_along_axis(reference, places, -1).astype(np.float64) for places in (wanted, chosen))
        difference: Array = best - other
    return difference
