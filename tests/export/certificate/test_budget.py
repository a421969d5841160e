from __future__ import annotations

import math

import numpy as np
import pytest

from export.certificate.budget import Budget, adversarial_violations, violations
from export.certificate.figures import Figures
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


def choices(rows: int, flipped: int, apart: float) -> Figures:
    """Rows of two classes; in the first ones the candidate prefers the class that the reference has a little below."""
    reference = np.tile([0.0, 1.0], (rows, 1))
    reference[:flipped, 0] = 1 - apart
    candidate = reference.copy()
    candidate[:flipped, 0] = 1 + 1e-3
    return compare(reference, candidate)


@pytest.mark.parametrize(
    ("rows", "flipped", "apart", "budget", "found"),
    [
        (108, 1, 0.004, Budget(), []),
        (10, 1, 0.004, Budget(), []),
        (9, 1, 0.004, Budget(), ["agreement 0.8889 (limit 0.9950): 1 of 9 rows differ"]),
        (108, 2, 0.004, Budget(), ["agreement 0.9815 (limit 0.9950): 2 of 108 rows differ"]),
        (108, 1, 0.02, Budget(max_scaled_error=0.03), []),
        (108, 1, 0.02, Budget(max_abs_error=0.03), []),
        (108, 1, 0.04, Budget(max_scaled_error=0.05, max_abs_error=0.042), []),
        (108, 1, 0.004, Budget(min_agreement=1), ["agreement 0.9907 (limit 1.0000): 1 of 108 rows differ"]),
        (400, 2, 0.004, Budget(), []),
        (400, 3, 0.004, Budget(), ["agreement 0.9925 (limit 0.9950): 3 of 400 rows differ"]),
    ],
)
def test_of_few_rows_one_near_tie_may_differ(rows: int, flipped: int, apart: float, budget: Budget, found: list[str]) -> None:
    assert violations(choices(rows, flipped, apart), budget) == found


def test_a_row_that_float32_is_sure_of_may_not_differ() -> None:
    reference = np.tile([0.0, 1.0], (108, 1))
    reference[0, 0] = 0.985
    candidate = reference.copy()
    candidate[0] = 0.994, 0.993  # each within the error that is allowed
    assert violations(compare(reference, candidate), Budget()) == ["agreement 0.9907 (limit 0.9950): 1 of 108 rows differ"]


def test_of_few_whole_numbers_none_may_differ() -> None:
    numbers = np.arange(108)
    other = np.where(numbers == 7, 8, numbers)
    assert violations(compare(numbers, other), Budget()) == ["agreement 0.9907 (limit 0.9950): 1 of 108 values differ"]
