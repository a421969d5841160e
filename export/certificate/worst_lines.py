"""The many lines of adversarial samples, one for each case."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from export.certificate.certificate import Certificate
    from export.certificate.verdicts import AdversarialVerdict


def worst_lines(certificate: Certificate) -> list[AdversarialVerdict]:
    """For each adversarial case, in order, its line that is over budget, or else that with the largest scaled error."""
    worst: dict[str, AdversarialVerdict] = {}
    for line in certificate.adversarial:
        if line.case not in worst or _rank(line) > _rank(worst[line.case]):
            worst[line.case] = line
    return list(worst.values())


def _rank(line: AdversarialVerdict) -> tuple[bool, float]:
    error = line.figures.max_scaled_error if line.figures else 0.0
    return bool(line.violations), error if math.isfinite(error) else -1.0
