from __future__ import annotations

import numpy as np

from export.certificate.budget import Budget
from export.certificate.certificate import OutputVerdict
from export.certificate.verdicts import AdversarialVerdict
from export.verification.adversarial import Case
from export.verification.children import Value
from export.verification.edge_cases import headroom, judge_cases
from export.verification.judging import Output
from export.verification.metrics import compare

USUAL = OutputVerdict(name="y", execution="rounded", figures=compare(np.full(3, 10.0), np.full(3, 10.0)), violations=())


def judged(
    wanted: list[Value] | str, got: list[Value] | str, *, factor: float | None = None, budget: Budget | None = None
) -> AdversarialVerdict:
    cases = [Case(name="zeros", feed={}, factor=factor)]
    (line,) = judge_cases(cases, [wanted], {"rounded": [got]}, [USUAL], [Output(name="y")], budget or Budget())
    return line


def test_five_times_the_usual_error_is_allowed_in_units_of_the_usual_scale() -> None:
    assert judged([np.zeros(2)], [np.full(2, 0.49)]).violations == ()
    (text,) = judged([np.zeros(2)], [np.full(2, 0.51)]).violations
    assert text == "max error 0.51 at the output's scale 10 (limit 0.05 of it)"
    (text,) = judged([np.zeros(2)], [np.full(2, 0.51)], budget=Budget(max_abs_error=0.1)).violations
    assert text == "max abs error 0.51 (limit 0.5)"


def test_nan_that_the_reference_does_not_have_is_over_budget_and_its_own_is_not() -> None:
    assert judged([np.array([1.0, np.nan])], [np.array([1.0, np.nan])]).violations == ()
    assert judged([np.array([1.0, 2.0])], [np.array([1.0, np.nan])]).violations == (
        "1 of 2 values are NaN or infinite (limit 0)",
    )


def test_what_the_reference_cannot_answer_in_float16_is_not_judged() -> None:
    beyond = judged([np.array([1e5])], [np.array([np.inf])])
    assert (beyond.note, beyond.violations) == ("the reference itself answers 1e+05, which float16 cannot hold", ())
    assert judged([np.array([np.nan])], [np.array([1.0])]).note == "the reference itself answers nothing finite"
    assert judged("index 9 is out of bounds", [np.zeros(1)]).note == "the reference fails on it: index 9 is out of bounds"


def test_a_candidate_that_fails_where_the_reference_does_not_is_over_budget() -> None:
    assert judged([np.zeros(1)], "killed by SIGSEGV").violations == ("killed by SIGSEGV",)
    assert judged([np.zeros(1)], [np.zeros(2)]).violations == ("shape [2], the reference [1]",)


def test_headroom_ends_at_the_first_factor_that_breaks() -> None:
    def line(factor: float, *violations: str, note: str | None = None) -> AdversarialVerdict:
        return AdversarialVerdict(case="", execution="", output="", factor=factor, violations=violations, note=note)

    assert headroom([line(4), line(16), line(64, "NaN")]) == 16
    assert headroom([line(4, "NaN"), line(16), line(64)]) == 1
    assert headroom([line(4), line(16, note="beyond float16")]) == 4
    assert headroom([line(4, note="beyond float16")]) is None
    assert headroom([]) is None
