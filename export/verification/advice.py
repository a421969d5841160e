"""What to tell a user whose model is over budget."""

from __future__ import annotations

import math

from export.certificate.budget import NO_HEADROOM, NOTHING_FINITE, disagrees, error_limit, lone_near_tie
from export.certificate.certificate import Certificate
from export.verification.steepness import Steepness

MEANS = "--block-node, --block-op of halfserve convert, --keep-fp32 of halfserve export"


def advice(certificate: Certificate, steep: Steepness, vanishing: str = "") -> str:
    """The worst offence, how many more there are, and what to do, in one line.

    Args:
        certificate: The verdict.
        steep: What float32 itself does on rounded inputs.
        vanishing: What to do about outputs that vanish (see `export.verification.vanishing`); empty where none does.
    """
    offences = certificate.violations
    if not offences:
        return "no output holds a number that was compared, so nothing is proved; give samples that the model answers with some"
    more = f" (and {len(offences) - 1} more over budget)" if len(offences) > 1 else ""
    if all(NOTHING_FINITE in offence or NO_HEADROOM in offence for offence in offences):
        return f"{offences[0]}{more}"
    return f"{offences[0]}{more}; {_way_out(certificate, steep, vanishing)}"


def _way_out(certificate: Certificate, steep: Steepness, vanishing: str) -> str:
    if steep.unsteady:
        return (
            f"float32 itself answers the very same differently a second time ({steep.unsteady[0]}): it draws random numbers or "
            "keeps something from one call to the next, so nothing can be proved of it; make it answer alike"
        )
    if vanishing:
        return vanishing
    if steep.violations:
        found = f"float32 itself leaves the budget when only its inputs are rounded to float16 ({steep.violations[0]})"
        if steep.half_inputs:
            return f"{found}, so float16 inputs cannot meet it: keep float32 ones (--keep-io-types) or allow more"
        return f"{found}, so it bears little float16: allow more, or serve it in float32"
    if choices := _choices_alone(certificate):
        return choices
    non_finite = any(verdict.figures.non_finite > certificate.budget.max_non_finite for verdict in certificate.outputs)
    usual = any(verdict.violations for verdict in certificate.outputs) or not any(
        line.violations for line in certificate.adversarial if line.factor is None
    )
    parts = "the layers that overflow" if non_finite else "sensitive layers"
    edge = "" if usual else "; where no such input can come, leave those samples out (--no-adversarial)"
    return f"keep {parts} in float32 ({MEANS}) or allow a larger difference{edge}"


def _choices_alone(certificate: Certificate) -> str | None:
    """What to say where everything is within budget but which class is largest; None otherwise."""
    budget, over = certificate.budget, [verdict.figures for verdict in certificate.outputs if verdict.violations]
    lost = [figures for figures in over if disagrees(figures, budget) and not lone_near_tie(figures, budget)]
    if not lost or len(lost) != len(certificate.violations):
        return None
    layers = f"keep sensitive layers in float32 ({MEANS})"
    if any(figures.margin > error_limit(figures, budget) for figures in lost):
        return f"{layers} or allow more rows to differ (--min-agreement)"
    share = math.floor(min(figures.agreement or 0.0 for figures in lost) * 1000) / 1000
    return (
        "where they differ, float32's two numbers are closer than the error that is allowed, "
        f"so verify on other or more samples, {layers} or allow it (--min-agreement {share:g})"
    )
