"""How far one output is from its reference, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The distance of a candidate from its reference. Errors are taken where both are finite; NaN where nothing is.

    Attributes:
        elements: How many numbers were compared, the non-finite ones included.
        scale: The largest finite magnitude in the reference.
        max_abs_error: Largest |candidate - reference|.
        mean_abs_error: Mean of the same.
        max_rel_error: Largest |candidate - reference| / |reference|, |reference| taken as at least 2**-14 (float16's smallest
            normal number), since near 0 a relative error says nothing.
        mean_rel_error: Mean of the same.
        max_scaled_error: `max_abs_error / scale`: the error in units of the output as a whole, whose scale is taken as at least
            2**-14 too: float16's steps below are 2**-24, so an output of 1e-7, such as a sigmoid's, has no digits there.
        max_ulp: Largest distance in float16 steps, both rounded to float16: 1 is the next number.
        cosine: Cosine of the angle between the two, flattened; 1 for two zero vectors.
        non_finite: Places where exactly one of the two is NaN or infinite, or both are but differ in kind or sign.
        agreement: Share of rows with the same argmax (see `argmax_agreement`), of equal elements for what is not floating; None
            where there is nothing to choose between.
        floating: Whether these are floating-point numbers. Integers, booleans and texts are equal or not: only `agreement` says
            how good they are.
        rows: What `agreement` is a share of: rows, or elements for what is not floating.
        differing: How many of these do not agree.
        margin: By how much the reference prefers its choice to the candidate's, at most, over the rows that do not agree;
            infinite where one of the two is no number, or there are no two to compare.
    """

    elements: int
    scale: float
    max_abs_error: float
    mean_abs_error: float
    max_rel_error: float
    mean_rel_error: float
    max_scaled_error: float
    max_ulp: float
    cosine: float
    non_finite: int
    agreement: float | None
    floating: bool = True
    rows: int = 0
    differing: int = 0
    margin: float = 0.0
