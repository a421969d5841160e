from __future__ import annotations

import math

import numpy as np
import pytest

from export.certificate.budget import Budget, adversarial_violations, violations
from export.verification.metrics import Array, compare

ONES: Array = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("error", "budget", "found"),
    [
        (0.04, Budget(max_abs_error=0.01), []),
        (0.06, Budget(max_abs_error=0.01), ["max abs error 0.06 (limit 0.05)"]),
        (0.06, Budget(max_abs_error=0.01, adversarial_factor=10), []),
        (0.04, Budget(), []),
        (0.06, Budget(), ["max error 0.06 at the output's scale 1 (limit 0.05 of it)"]),
        (math.nan, Budget(max_abs_error=0.01), ["1 of 4 values are NaN or infinite (limit 0)"]),
    ],
)
def test_at_the_edge_errors_may_be_larger_by_the_budgets_factor(error: float, budget: Budget, found: list[str]) -> None:
    candidate = ONES + np.array([0, 0, error, 0], np.float64)
    assert adversarial_violations(compare(ONES, candidate), math.nan, budget) == found


def test_at_the_edge_integers_and_what_is_finite_nowhere_are_not_judged() -> None:
    budget = Budget(max_abs_error=0.01)
    assert adversarial_violations(compare(np.array([1, 2]), np.array([2, 1])), math.nan, budget) == []
    assert adversarial_violations(compare(ONES * np.inf, ONES * np.inf), math.nan, budget) == []


def test_a_figure_at_its_limit_is_within_it() -> None:
    figures = compare(np.array([1.0, np.inf, 3.0]), np.array([1.25, 2.0, 3.0]))
    assert violations(figures, Budget(max_abs_error=0.25, max_non_finite=1)) == []
    assert violations(figures, Budget(max_abs_error=0.2, max_non_finite=0)) == [
        "1 of 3 values are NaN or infinite (limit 0)",
        "max abs error 0.25 (limit 0.2)",
    ]
