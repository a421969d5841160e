"""The error figures of an output, and the budget that they must stay within."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from halfserve.export.export_errors import UsageError
from halfserve.export.half_types import FP16_SMALLEST_NORMAL, HalfName

NOTHING_FINITE = "there is no place where both are finite, so nothing is proved: give other samples"
FEW_ROWS_LEFT = "with NaN, so fewer than half are left, which prove nothing: give samples that it answers with numbers"
# The largest scaled error by default, by the candidate's type: see `Budget` and `usual_budgets`.
MAX_SCALED_ERROR: dict[HalfName, float] = {"float16": 0.01, "bfloat16": 0.04}
# With fewer rows, a single differing row is too large a share.
FEWEST_ROWS = 10
NO_HEADROOM = "headroom was not measured, as no floating input could be made larger: give other samples, or ask for none"


@dataclass(frozen=True, kw_only=True)
class ColumnKind:
    """Columns of an output with magnitudes of one order, and the largest error in them.

    Attributes:
        columns: Indices along the axis that separates the kinds, as ranges (first, last), both inclusive.
        scale: The reference's largest finite magnitude in these columns.
        unit: Divisor of their errors (see `halfserve.export.verification.error_units`).
        max_abs_error: Largest |candidate - reference|; NaN where nothing was compared.
        worst: The column with that error.
    """

    columns: tuple[tuple[int, int], ...]
    scale: float
    unit: float
    max_abs_error: float = float("nan")
    worst: int = 0

    @property
    def max_scaled_error(self) -> float:
        return self.max_abs_error / self.unit


@dataclass(frozen=True, kw_only=True)
class Vanished:
    """Part of an output that is 0 on every sample in the candidate and not in the reference.

    Attributes:
        axis: The axis of the vanished columns; None where the whole output vanishes.
        columns: Number of vanished columns; 1 where the whole output vanishes.
        first: The first vanished column.
        largest: The reference's largest magnitude in the vanished part.
    """

    axis: int | None
    columns: int
    first: int
    largest: float


@dataclass(frozen=True, kw_only=True)
class ErrorFigures:
    """Error metrics of one output. Errors are taken where both models are finite, and are NaN where no place is.

    Attributes:
        elements: Count of compared numbers, non-finite ones included.
        scale: The largest finite magnitude in the reference.
        max_abs_error: Largest |candidate - reference|.
        mean_abs_error: Mean |candidate - reference|.
        max_rel_error: Largest |candidate - reference| / max(|reference|, 2**-14); 2**-14 is float16's smallest normal number.
        mean_rel_error: Mean of that quotient.
        max_scaled_error: Largest error divided by the unit of the output, or of its kind of columns (see
            `halfserve.export.verification.error_units`).
        max_ulp: Largest distance in steps of the candidate's type after both are rounded to it.
        cosine: Cosine similarity of the flattened arrays; 1 for two zero vectors.
        non_finite: Places where exactly one model is NaN or infinite, or both are with another kind or sign.
        agreement: Share of rows with the same argmax (see `argmax_agreement`), or of equal elements in an output of integers,
            booleans or text; None where no row has a choice.
        floating: Whether the output holds floating-point numbers. Any other output is judged by `agreement` alone.
        rows: Count that `agreement` is a share of: rows, or elements of an output that is not floating.
        differing: How many of `rows` disagree.
        margin: Over the disagreeing rows, the largest lead of the reference's choice over the candidate's choice; infinite
            where one of the two is not finite, or the output is not floating.
        unit: Divisor of errors where the output is one kind; otherwise the unit of the columns that `margin` is about.
            0 in certificates before version 3, where the divisor is max(scale, 2**-14).
        axis: The axis that separates kinds of columns; None where the output is one kind.
        kinds: The kinds, largest scale first; empty where the output is one kind.
        vanished: The part that is 0 in the candidate only; None where no part is.
        constant_rows: Rows left out of `rows` because agreement there is no evidence: after rounding to the candidate's type
            the reference gives all classes one number, chooses the same class in all rows, or answers all samples alike.
        commonest: How many of `rows` the reference's most frequent choice takes; a model that always makes this choice agrees
            in as many. 0 in outputs that are not floating, and in older certificates.
        nan_rows: Rows that the reference itself answers with NaN, along the axis of classes (see `class_axis`); elements of an
            output without one. Where the candidate does so too, they are left out of `rows`. Where more than half are such
            rows, nothing is proved.
        all_rows: Count that `nan_rows` is a part of; 0 in outputs that are not floating, and in certificates before version 6.
        noise: Change of the reference's own answers when its inputs change in the last float32 bit. Errors up to twice that
            are allowed. 0 where it was not measured.
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
    kinds: tuple[ColumnKind, ...] = ()
    vanished: Vanished | None = None
    constant_rows: int = 0
    commonest: int = 0
    nan_rows: int = 0
    all_rows: int = 0
    noise: float = 0.0

    @property
    def mostly_nan(self) -> bool:
        """Whether the reference answers more than half of the rows with NaN."""
        return 2 * self.nan_rows > self.all_rows

    @property
    def worst_kind(self) -> ColumnKind | None:
        return max(
            self.kinds, key=lambda kind: (kind.max_scaled_error == kind.max_scaled_error, kind.max_scaled_error), default=None
        )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits for every output. A figure that is NaN is over its limit.

    Attributes:
        max_scaled_error: Largest error divided by the reference's largest magnitude, per kind of columns (see
            `halfserve.export.verification.error_units`). The default, 0.01, is float16's: twenty of its roundings (2**-11 each)
            of that magnitude; sound conversions measure 0.0004 to 0.0015. See `usual_budgets` for bfloat16's.
        max_abs_error: Largest absolute error; replaces `max_scaled_error` when given.
        min_agreement: Least share of rows with the reference's argmax (of equal elements in integer outputs), 0 to 1. Below 1,
            a single differing row among ten or more is allowed where it is a near-tie (see `allowed_near_ties`).
        judge_near_ties: Whether other near-ties count as differing rows. False for made-up samples, on which a model hardly
            prefers any class: their choices mean nothing.
        max_non_finite: How many values may be NaN or infinite where the reference's are not.
        adversarial_factor: Multiplies `max_scaled_error` and `max_abs_error` on the adversarial samples (see
            `halfserve.export.verification.generated.adversarial`).
        min_headroom: Factor by which inputs must be able to exceed the user's samples; 1 asks for nothing.
    """

    max_scaled_error: float = 0.01
    max_abs_error: float | None = None
    min_agreement: float = 0.995
    judge_near_ties: bool = True
    max_non_finite: int = 0
    adversarial_factor: float = 5.0
    min_headroom: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_scaled_error", "max_abs_error", "max_non_finite", "adversarial_factor", "min_headroom"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{name} is {value}; expected a number of at least 0")
        if not 0 <= self.min_agreement <= 1:
            raise UsageError(f"min_agreement is {self.min_agreement}; expected a share from 0 to 1")


def usual_budgets(
    *,
    max_scaled_error: float | None = None,
    max_abs_error: float | None = None,
    min_agreement: float = Budget.min_agreement,
) -> dict[HalfName, Budget]:
    """Return the budget of each type, whose largest scaled error is by default 0.01 for float16 and 0.04 for bfloat16.

    bfloat16 rounds eight times as coarsely (2**-8). Sound conversions measure 0.003 to 0.03; models that do not stand it, such
    as sharp attention and differences of large numbers, 0.1 and more.
    """
    return {
        precision: Budget(
            max_scaled_error=usual if max_scaled_error is None else max_scaled_error,
            max_abs_error=max_abs_error,
            min_agreement=min_agreement,
        )
        for precision, usual in MAX_SCALED_ERROR.items()
    }


def violations(figures: ErrorFigures, budget: Budget) -> list[str]:
    """Describe each figure that is over budget, with its value and its limit.

    Integers, booleans and texts are judged by their agreement only, unless `max_abs_error` is given. An output without
    elements is within every budget; the certificate requires that some output has elements.
    """
    if figures.elements == 0:
        return []
    broken = _non_finite(figures, budget)
    if math.isnan(figures.max_abs_error):
        if not broken:  # otherwise the candidate is not finite, and other samples would not help
            broken.append(NOTHING_FINITE)
        return broken
    if figures.mostly_nan:
        broken.append(f"float32 itself answers {figures.nan_rows} of {figures.all_rows} rows {FEW_ROWS_LEFT}")
    if budget.max_abs_error is not None:
        if not figures.max_abs_error <= budget.max_abs_error:
            broken.append(f"max abs error {figures.max_abs_error:.3g} (limit {budget.max_abs_error:.3g})")
    elif figures.floating:
        broken += _scaled_errors(figures, budget.max_scaled_error)
    if disagrees(figures, budget) and not allowed_near_ties(figures, budget):
        broken.append(
            f"agreement {figures.agreement:.4f} (limit {budget.min_agreement:.4f}): "
            f"{figures.differing} of {figures.rows} {'rows' if figures.floating else 'values'} differ"
        )
    return broken


def _scaled_errors(figures: ErrorFigures, limit: float) -> Iterator[str]:
    vanished = figures.vanished
    if vanished is not None:
        more = f" and {vanished.columns - 1} more" if vanished.columns > 1 else ""
        what = "the output is" if vanished.axis is None else f"column {vanished.first}{more} on axis {vanished.axis} is"
        yield f"{what} 0 throughout and up to {vanished.largest:.3g} in float32: it vanishes in half precision"
    if figures.max_scaled_error <= limit or (vanished is not None and vanished.axis is None):
        return
    error, kind = f"max error {figures.max_scaled_error:.3g}", figures.worst_kind
    if kind is None:
        yield f"{error} of the output's largest magnitude {figures.unit or figures.scale:.3g} (limit {limit:.3g})"
    elif vanished is None or kind.worst != vanished.first:
        place = f"column {kind.worst} on axis {figures.axis}"
        yield f"{error} of the largest magnitude {kind.unit:.3g} of {place} (limit {limit:.3g})"


def _non_finite(figures: ErrorFigures, budget: Budget) -> list[str]:
    if figures.non_finite <= budget.max_non_finite:
        return []
    return [f"{figures.non_finite} of {figures.elements} values are NaN or infinite (limit {budget.max_non_finite})"]


def disagrees(figures: ErrorFigures, budget: Budget) -> bool:
    """Return whether fewer rows agree than `min_agreement` requires."""
    return figures.agreement is not None and not figures.agreement >= budget.min_agreement


def allowed_near_ties(figures: ErrorFigures, budget: Budget) -> bool:
    """Return whether all differing rows are near-ties that prove nothing: there is only one, or the budget does not judge them.

    In a near-tie the reference's two numbers are closer than the allowed error.

    With fewer than 1 / (1 - min_agreement) rows, 200 by default, one differing row already exceeds the limit, so a single
    near-tie proves nothing. Two differing rows, or one with a clear lead, do.
    """
    alone = figures.differing == 1 and figures.rows >= FEWEST_ROWS
    return (alone or not budget.judge_near_ties) and budget.min_agreement < 1 and figures.margin <= error_limit(figures, budget)


def error_limit(figures: ErrorFigures, budget: Budget) -> float:
    """Return the largest absolute error that an output may have."""
    if budget.max_abs_error is not None:
        return budget.max_abs_error
    return budget.max_scaled_error * unit_of(figures)


def unit_of(figures: ErrorFigures) -> float:
    """Return the divisor of the output's errors; computed for certificates before version 3, which do not hold it."""
    return figures.unit or max(figures.scale, FP16_SMALLEST_NORMAL)


def adversarial_violations(
    figures: ErrorFigures, usual_scale: float, budget: Budget, smallest: float = FP16_SMALLEST_NORMAL
) -> list[str]:
    """Describe what is over budget on an adversarial sample.

    Non-finite values count as usual, and errors up to `adversarial_factor` times the limit are allowed. Agreement is not
    judged: the classes of such samples mean nothing. Errors are divided by the larger of the output's scale there and its unit
    on the user's samples, `usual_scale`, since every rounding is large beside an answer that vanishes; the units of kinds of
    columns include that already. `smallest` is the smallest number that the candidate's type holds with all digits.
    """
    broken = _non_finite(figures, budget)
    if not figures.floating or not math.isfinite(figures.max_abs_error):
        return broken
    if budget.max_abs_error is not None:
        limit = budget.max_abs_error * budget.adversarial_factor
        over = figures.max_abs_error > limit
        return broken + ([f"max abs error {figures.max_abs_error:.3g} (limit {limit:.3g})"] if over else [])
    limit = budget.max_scaled_error * budget.adversarial_factor
    if (kind := figures.worst_kind) is not None:
        if kind.max_scaled_error > limit:
            place = f"column {kind.worst} on axis {figures.axis}"
            error = f"max error {kind.max_abs_error:.3g} in {place}"
            broken.append(f"{error}, of the largest magnitude {kind.unit:.3g} (limit {limit:.3g} of it)")
        return broken
    scale = max(s for s in (smallest, figures.scale, usual_scale) if math.isfinite(s))
    if figures.max_abs_error > limit * scale:
        error = f"max error {figures.max_abs_error:.3g}"
        broken.append(f"{error} at the output's largest magnitude {scale:.3g} (limit {limit:.3g} of it)")
    return broken
