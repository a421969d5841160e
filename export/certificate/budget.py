"""How much an fp16 model may differ from its reference, and where it differs by more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from export.errors import UsageError
from export.weight_ledger import FP16_SMALLEST_NORMAL

if TYPE_CHECKING:
    from export.certificate.figures import Figures, Vanished

NOTHING_FINITE = "there is no place where both are finite, so nothing is proved: give other samples"
# Of fewer rows, the one that may differ is too large a share of what was looked at.
FEWEST_ROWS = 10
NO_HEADROOM = "headroom was not measured, as no floating input could be made larger: give other samples, or ask for none"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits for every output. A figure that is NaN is over its limit.

    Attributes:
        max_scaled_error: Largest error in units of the reference's largest magnitude, in each kind of column for itself (see
            `export.verification.columns`). The default, 0.01, is twenty float16 roundings (2**-11 each) of that magnitude;
            sound conversions measure 0.0004 to 0.0015.
        max_abs_error: Largest error in the output's own unit; when given, it replaces `max_scaled_error`.
        min_agreement: Least share of rows with the reference's argmax (of equal elements for integer outputs), 0 to 1. Below 1,
            one row may differ however few they are, from ten on, if it is a near-tie (see `lone_near_tie`).
        max_non_finite: How many NaN or infinite values may appear that the reference does not have.
        adversarial_factor: How many times `max_scaled_error` or `max_abs_error` is allowed on the samples of
            `export.verification.adversarial`, which lie at the edge of what the user's samples are, or beyond.
        min_headroom: How many times larger than the user's samples inputs must be able to grow; 1 asks for nothing.
    """

    max_scaled_error: float = 0.01
    max_abs_error: float | None = None
    min_agreement: float = 0.995
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


def violations(figures: Figures, budget: Budget) -> list[str]:
    """What is over budget, each in words with its value and its limit; empty when all is within.

    Of integers, booleans and texts only the agreement is judged, unless `max_abs_error` is given. An output without elements is
    within every budget; that some output has elements is asked of the certificate.
    """
    broken: list[str] = []
    if figures.elements == 0:
        return broken
    if not figures.non_finite <= budget.max_non_finite:
        broken.append(f"{figures.non_finite} of {figures.elements} values are NaN or infinite (limit {budget.max_non_finite})")
    if math.isnan(figures.max_abs_error):
        if not broken:  # else it is the candidate that is not finite, and other samples would not help
            broken.append(NOTHING_FINITE)
    elif budget.max_abs_error is not None:
        if not figures.max_abs_error <= budget.max_abs_error:
            broken.append(f"max abs error {figures.max_abs_error:.3g} (limit {budget.max_abs_error:.3g})")
    elif figures.floating:
        broken += _scaled_errors(figures, budget.max_scaled_error)
    if disagrees(figures, budget) and not lone_near_tie(figures, budget):
        broken.append(
            f"agreement {figures.agreement:.4f} (limit {budget.min_agreement:.4f}): "
            f"{figures.differing} of {figures.rows} {'rows' if figures.floating else 'values'} differ"
        )
    return broken


def _scaled_errors(figures: Figures, limit: float) -> Iterator[str]:
    """What vanishes, and the largest scaled error where it is something else."""
    gone = figures.vanished
    if gone is not None:
        what = "the output is" if gone.axis is None else f"column {gone.first}{_beside(gone)} is"
        yield f"{what} 0 throughout and up to {gone.largest:.3g} in float32: it vanishes in float16"
    if figures.max_scaled_error <= limit or (gone is not None and gone.axis is None):
        return
    error, kind = f"max error {figures.max_scaled_error:.3g}", figures.worst_kind
    if kind is None:
        yield f"{error} of the output's scale {figures.unit or figures.scale:.3g} (limit {limit:.3g})"
    elif gone is None or kind.worst != gone.first:
        yield f"{error} of the scale {kind.unit:.3g} of column {kind.worst} on axis {figures.axis} (limit {limit:.3g})"


def _beside(gone: Vanished) -> str:
    more = f" and {gone.columns - 1} more" if gone.columns > 1 else ""
    return f"{more} on axis {gone.axis}"


def disagrees(figures: Figures, budget: Budget) -> bool:
    """Whether fewer rows than `min_agreement` asks for have the reference's choice."""
    return figures.agreement is not None and not figures.agreement >= budget.min_agreement


def lone_near_tie(figures: Figures, budget: Budget) -> bool:
    """Whether one row alone differs, and the reference's two numbers there are closer than the error that is allowed.

    Fewer than 1 / (1 - min_agreement) rows, 200 by default, cannot show a share of `min_agreement`: one row is more than what
    may differ, whatever the model's share is. More of them than that one, or one that the reference is sure of, say that
    choices are lost.
    """
    alone = figures.differing == 1 and figures.rows >= FEWEST_ROWS
    return alone and budget.min_agreement < 1 and figures.margin <= error_limit(figures, budget)


def error_limit(figures: Figures, budget: Budget) -> float:
    """The largest error that an output may have, in its own unit."""
    if budget.max_abs_error is not None:
        return budget.max_abs_error
    return budget.max_scaled_error * unit_of(figures)


def unit_of(figures: Figures) -> float:
    """What the output's errors are divided by as a whole; of certificates that do not say it, as it was then."""
    return figures.unit or max(figures.scale, FP16_SMALLEST_NORMAL)


def adversarial_violations(figures: Figures, usual_scale: float, budget: Budget) -> list[str]:
    """What is over budget on an adversarial sample, in words.

    Judged are non-finite values that the reference does not have, and errors, `adversarial_factor` times larger ones allowed.
    Agreement is not: classes of such samples mean nothing.

    Args:
        figures: The figures on that sample.
        usual_scale: The output's unit on the user's samples. Errors count in units of the larger of the two scales: where
            an input makes the reference's answer vanish, any rounding would be large beside it. Where kinds of columns are
            told apart, their units hold that already.
        budget: The limits.
    """
    broken: list[str] = []
    if not figures.non_finite <= budget.max_non_finite:
        broken.append(f"{figures.non_finite} of {figures.elements} values are NaN or infinite (limit {budget.max_non_finite})")
    if not figures.floating or not math.isfinite(figures.max_abs_error):
        return broken
    if budget.max_abs_error is not None:
        limit = budget.max_abs_error * budget.adversarial_factor
        if figures.max_abs_error > limit:
            broken.append(f"max abs error {figures.max_abs_error:.3g} (limit {limit:.3g})")
        return broken
    limit = budget.max_scaled_error * budget.adversarial_factor
    kind = figures.worst_kind
    if kind is not None and kind.max_scaled_error > limit:
        place = f"column {kind.worst} on axis {figures.axis}"
        broken.append(f"max error {kind.max_abs_error:.3g} in {place}, of scale {kind.unit:.3g} (limit {limit:.3g} of it)")
    if kind is not None:
        return broken
    scale = max(s for s in (FP16_SMALLEST_NORMAL, figures.scale, usual_scale) if math.isfinite(s))
    if figures.max_abs_error > limit * scale:
        broken.append(f"max error {figures.max_abs_error:.3g} at the output's scale {scale:.3g} (limit {limit:.3g} of it)")
    return broken
