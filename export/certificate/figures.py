"""How far one output is from its reference, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Columns of an output whose magnitudes are alike, and the largest error in them.

    Attributes:
        columns: Their indices along the axis that separates the kinds, as ranges (first, last), both included.
        scale: The reference's largest finite magnitude in them.
        unit: What their errors are divided by (see `export.verification.columns`).
        max_abs_error: Largest |candidate - reference| in them; NaN where nothing was compared.
        worst: The column of that error.
    """

    columns: tuple[tuple[int, int], ...]
    scale: float
    unit: float
    max_abs_error: float = float("nan")
    worst: int = 0

    @property
    def max_scaled_error(self) -> float:
        """The largest error in units of `unit`."""
        return self.max_abs_error / self.unit


@dataclass(frozen=True, kw_only=True)
class Vanished:
    """What is 0 throughout in the candidate and is not in the reference.

    Attributes:
        axis: The axis that the columns lie along; None where it is the whole output.
        columns: How many columns vanish; 1 where it is the whole output.
        first: The first of them.
        largest: The reference's largest magnitude in what vanishes.
    """

    axis: int | None
    columns: int
    first: int
    largest: float


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
        max_scaled_error: Largest error in units of the output, or of its kind of column where kinds are told apart (see
            `export.verification.columns`).
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
        unit: What errors are divided by where no kinds are told apart; also the unit of `margin`'s columns where they are.
            0 in certificates of versions before 3, where it is the scale or 2**-14, whichever is more.
        axis: The axis along which kinds of columns are told apart; None where all of the output is one kind.
        kinds: The kinds, the largest scale first; empty where all of the output is one.
        vanished: What is 0 throughout in the candidate only; None where nothing is.
        constant_rows: Rows left out of `rows`: as far as float16 tells, the reference has one number for all classes there, or
            answers all samples alike, and agreement is no evidence.
        noise: How far the reference's own answers move when its inputs change in their last float32 bit, where that was
            measured: errors up to twice as large are no fault of the candidate. 0 where it was not needed.
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
    unit: float = 0.0
    axis: int | None = None
    kinds: tuple[Kind, ...] = ()
    vanished: Vanished | None = None
    constant_rows: int = 0
    noise: float = 0.0

    @property
    def worst_kind(self) -> Kind | None:
        """The kind of columns with the largest scaled error; None where no kinds are told apart."""
        return max(
            self.kinds, key=lambda kind: (kind.max_scaled_error == kind.max_scaled_error, kind.max_scaled_error), default=None
        )
