from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfserve.export.certificate.budget import Budget, ErrorFigures, adversarial_violations, violations
from halfserve.export.verification.error_units import learned_units, recorded_units
from halfserve.export.verification.metrics import (
    argmax_agreement,
    compare,
    compare_parts,
    cosine,
    non_finite_differences,
    ulp_distance,
)
from halfserve.export.verification.samples import Array

halves = hnp.arrays(np.float16, st.integers(1, 20), elements=st.floats(-65504, 65504, width=16))
tables = hnp.arrays(np.float32, st.tuples(st.integers(1, 8), st.integers(2, 6)), elements=st.floats(-100, 100, width=32))
RNG = np.random.default_rng(0)
ROWS = 64


@given(halves)
def test_the_next_number_is_one_step_away(values: Array) -> None:
    with np.errstate(over="ignore"):
        above = np.nextafter(values, np.float16(np.inf))
    assert (ulp_distance(values, above) == 1).all()
    assert (ulp_distance(above, values) == 1).all()


@given(halves, st.data())
def test_steps_add_up_along_the_number_line(values: Array, data: st.DataObject) -> None:
    other = data.draw(hnp.arrays(np.float16, values.shape, elements=st.floats(-65504, 65504, width=16)))
    zero = np.zeros_like(values)
    across = np.sign(values) * ulp_distance(values, zero) - np.sign(other) * ulp_distance(other, zero)
    assert (ulp_distance(values, other) == np.abs(across)).all()


@given(tables)
def test_a_table_agrees_with_itself(table: Array) -> None:
    figures = compare(table, table)
    assert figures.agreement == (1 if figures.rows else None)
    assert figures.kinds or figures.rows + figures.constant_rows == len(table)
    assert figures.max_abs_error == figures.mean_rel_error == figures.max_ulp == figures.non_finite == 0
    assert figures.cosine == pytest.approx(1)


@given(tables, st.data())
def test_agreement_is_the_share_of_rows_left_alone(table: Array, data: st.DataObject) -> None:
    table = np.argsort(table, -1).astype(np.float32)  # no ties
    flipped = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))))
    candidate = np.where(flipped[:, None], -table, table)
    assert argmax_agreement(table, candidate) == pytest.approx(1 - flipped.mean())


SOUND, NAN = [[1.0, 2.0], [1.0, 2.0]], np.nan


@pytest.mark.parametrize(
    ("reference", "candidate", "agreement"),
    [
        ([[1.0, 1.0001, 0.0], [1.0, 1.1, 0.0]], [[1.0001, 1.0, 0.0], [1.1, 1.0, 0.0]], 0.5),
        ([[2.0, 1.0], [3.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], 0),  # class 0, which the argmax of a constant row is
        ([[1e6, 2e6]], [[np.inf, np.inf]], 0),
        *[(SOUND, broken, 0.5) for broken in ([[NAN, 2.0], [1.0, 2.0]], [[1.0, NAN], [1.0, 2.0]])],
        *[(broken, SOUND, 0.5) for broken in ([[NAN, 2.0], [1.0, 2.0]], [[1.0, NAN], [1.0, 2.0]])],
        *[(broken, broken, 1) for broken in ([[NAN, 2.0], [1.0, 2.0]], [[1.0, NAN], [1.0, 2.0]])],
        ([1, 2, 3, 4], [1, 2, 3, 5], 0.75),
    ],
)
def test_agreement_of_single_rows(reference: Any, candidate: Any, agreement: float) -> None:
    kind = np.float32 if np.ndim(reference) > 1 else np.int64
    assert compare(np.array(reference, kind), np.array(candidate, kind)).agreement == agreement


@pytest.mark.parametrize(
    ("reference", "candidate", "rows"),
    [
        ([[np.inf, 1.0], [1.0, 2.0]], [[0.5, 1.0], [1.0, 2.0]], 2),
        ([[1.0, np.nan], [1.0, 2.0]], [[0.5, 1.0], [1.0, 2.0]], 2),
        ([1, 2, 3, 4], [1, 2, 3, 5], 4),
    ],
)
def test_integers_and_non_finite_margins_are_no_near_ties(reference: Any, candidate: Any, rows: int) -> None:
    figures = compare(np.array(reference), np.array(candidate))
    assert (figures.rows, figures.differing, figures.margin) == (rows, 1, np.inf)


@pytest.mark.parametrize(("a", "b", "steps"), [(-0.0, 0.0, 0), (-(2.0**-24), 2.0**-24, 2)])
def test_steps_across_zero(a: float, b: float, steps: int) -> None:
    assert ulp_distance(np.array([a]), np.array([b])).item() == steps


def test_rows_in_which_the_reference_prefers_nothing_are_no_evidence() -> None:
    alike = np.array([[1.0, 1.0001], [3e-9, 1e-9]], np.float32)
    assert argmax_agreement(alike, alike[:, ::-1]) is None
    figures = compare(np.concatenate([alike, [[1.0, 2.0]]]), np.zeros((3, 2)))
    assert (figures.rows, figures.constant_rows, figures.differing) == (1, 2, 1)


def test_one_answer_to_all_samples_is_no_evidence() -> None:
    same = np.tile([1.0, 2.0], (4, 1))
    figures = compare(same, same)
    assert (figures.agreement, figures.constant_rows) == (None, 4)
    assert compare(same, same[:, ::-1]).agreement == 0
    assert compare(same[:1], same[:1]).agreement == 1


def test_one_class_in_all_rows_is_no_evidence() -> None:
    reference = np.random.default_rng(0).random((32, 10)) + np.eye(10)[3]
    figures = compare(reference, reference)
    assert (figures.agreement, figures.rows, figures.constant_rows) == (None, 0, 32)
    other = reference.copy()
    other[5] = -reference[5]
    assert compare(reference, other).agreement == 31 / 32  # it is evidence against the candidate


def test_classes_of_pixels_lie_along_axis_one() -> None:
    reference = np.random.default_rng(0).random((1, 2, 3, 4))
    candidate = reference.copy()
    candidate[0, :, 0, 0] = reference[0, ::-1, 0, 0]
    assert argmax_agreement(reference, candidate) == pytest.approx(11 / 12)


def test_only_the_candidates_own_non_finite_values_count() -> None:
    reference = np.array([np.nan, np.inf, -np.inf, np.inf, 1.0, np.nan, 2.0])
    candidate = np.array([np.nan, np.inf, -np.inf, -np.inf, np.nan, 1.0, np.inf])
    assert non_finite_differences(reference, candidate) == 4


def test_errors_are_taken_where_both_are_finite() -> None:
    figures = compare(np.array([1.0, np.nan, 4.0]), np.array([1.5, np.nan, 4.0]))
    assert (figures.max_abs_error, figures.mean_abs_error, figures.scale) == (0.5, 0.25, 4.0)
    assert (figures.max_rel_error, figures.max_scaled_error) == (0.5, 0.125)


def test_figures_without_a_finite_place_are_nan() -> None:
    figures = compare(np.array([np.nan]), np.array([np.nan]))
    assert np.isnan([figures.max_abs_error, figures.max_scaled_error, figures.cosine]).all()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([0, 0], [0, 0], 1), ([0, 0], [1, 0], 0), ([1, 1], [-2, -2], -1), ([1, 0], [0, 3], 0), ([3, 4], [4, 3], 0.96)],
)
def test_cosine(a: list[float], b: list[float], expected: float) -> None:
    assert cosine(np.array(a, float), np.array(b, float)) == pytest.approx(expected)


@given(st.floats(1e-300, 1e300))
def test_cosine_neither_overflows_nor_vanishes(scale: float) -> None:
    assert cosine(np.array([scale, scale]), np.array([1.0, 1.0])) == pytest.approx(1)


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match=r"the candidate has shape \[3\], the reference \[2\]"):
        compare(np.zeros(2), np.zeros(3))


def test_differing_rows_are_counted_with_their_margin() -> None:
    first, second = np.array([[1.0, 2.0, 0.0], [5.0, 2.0, 4.5]]), np.array([[1.0, 3.0, 0.0]])
    parts = [(first, np.array([[1.0, 2.0, 0.0], [4.0, 2.0, 4.5]])), (second, np.array([[3.25, 3.0, 0.0]]))]
    figures = compare_parts(parts)
    assert (figures.rows, figures.differing, figures.margin) == (3, 2, 2.0)
    assert figures.agreement == pytest.approx(1 / 3)


def detector(scores: float = 0.9, rows: int = ROWS) -> Array:
    """[2, rows, 22]: boxes of up to 640 beside scores between 0 and 1."""
    boxes = RNG.uniform(8, 640, (2, rows, 4))
    return np.concatenate([boxes, scores * RNG.random((2, rows, 18)) ** 4], axis=-1).astype(np.float32)


def judged(reference: Array, candidate: Array) -> tuple[ErrorFigures, list[str]]:
    figures = compare(reference, candidate)
    return figures, violations(figures, Budget(min_agreement=0))


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True), np.float32)


def halved(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("scores", [0.9, 1e-4])
def test_a_detector_whose_scores_vanish_is_over_budget(axis: int, scores: float) -> None:
    reference = np.moveaxis(detector(scores), 2, axis)
    candidate = np.moveaxis(np.moveaxis(halved(reference), axis, 2) * np.r_[np.ones(4), np.zeros(18)], 2, axis)
    figures, broken = judged(reference, candidate)
    assert (figures.axis, [kind.columns for kind in figures.kinds]) == (axis, [((0, 3),), ((4, 21),)])
    assert any(f"column 4 and 17 more on axis {axis} is 0 throughout" in text for text in broken)
    assert judged(reference, halved(reference))[1] == []


def test_the_worst_column_is_named_with_its_unit() -> None:
    reference = detector()
    candidate = reference.copy()
    candidate[..., 0] += 3  # within 0.01 of 640
    candidate[1, 7, 9] += 0.05
    figures, broken = judged(reference, candidate)
    assert figures.worst_kind is not None
    assert figures.worst_kind.worst == 9
    (text,) = broken
    assert text.startswith("max error 0.05 of the largest magnitude 1 of column 9 on axis 2")


def test_choices_are_made_among_columns_of_one_kind() -> None:
    reference = detector()
    candidate = reference.copy()
    candidate[..., 4:] = reference[..., :3:-1]
    assert compare(reference, candidate).agreement == pytest.approx(0, abs=0.1)
    assert compare(reference, halved(reference)).agreement == 1


def test_columns_of_different_magnitude_have_own_units() -> None:
    reference = RNG.normal(size=(ROWS, 4)) * [1e4, 50, 1e-1, 1e-4]
    assert len(learned_units([reference]).kinds) == 4
    for column in range(4):
        candidate = reference.copy()
        candidate[:, column] *= 1.05
        figures, broken = judged(reference, candidate)
        assert figures.worst_kind is not None
        assert figures.worst_kind.worst == column
        assert len(broken) == 1
    assert judged(reference, halved(reference))[1] == []


def test_a_column_far_below_the_others_must_not_vanish_even_on_few_samples() -> None:
    reference = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32) * np.r_[np.ones(7), 1e-9].astype(np.float32)
    _, (vanished,) = judged(reference, halved(reference))
    assert vanished.startswith("column 7 on axis 1 is 0 throughout and up to")


@pytest.mark.parametrize("classes", [3, 1000])
def test_classes_without_samples_may_vanish(classes: int) -> None:
    logits = np.random.default_rng(2).normal(size=(ROWS, classes)).astype(np.float32) * 3
    logits[:, 0] += 12
    logits[:, -1] -= 25
    for reference in (softmax(logits), np.log(softmax(logits))):
        figures, broken = judged(reference, halved(reference))
        assert (broken, figures.kinds) == ([], ())


@pytest.mark.parametrize("rows", [2, ROWS])
def test_logits_that_are_small_by_chance_form_no_kind(rows: int) -> None:
    signal = np.random.default_rng(3).normal(size=(rows, 8)) * 1e-3
    reference = np.r_[0.1, -0.08, 0.05, 0.02, -0.06, 0.09, 0.07, 2e-3] + signal
    assert judged(reference, reference + 2e-4 * np.sign(signal))[1] == []


def test_columns_of_zeros_must_stay_near_zero() -> None:
    reference = np.concatenate([RNG.normal(size=(ROWS, 6)), np.zeros((ROWS, 2))], -1)
    assert judged(reference, reference + 1e-3)[1] == []
    assert len(judged(reference, reference + 0.1 * (reference == 0))[1]) == 1


def test_a_channel_that_is_mostly_zero_does_not_vanish() -> None:
    reference = np.maximum(RNG.normal(size=(4, 6, 5, 5)) - np.r_[0, 0, 0, 0, 0, 9].reshape(6, 1, 1), 0)
    reference[1, 5, 2, 2] = 1e-4
    candidate = reference.copy()
    candidate[:, 5] = 0
    assert judged(reference, candidate)[0].vanished is None


@pytest.mark.parametrize("largest", [1e-9, 1e-7, 3e-6, 1.0])
def test_an_output_that_becomes_zero_is_over_budget_however_small(largest: float) -> None:
    reference = RNG.uniform(-largest, largest, (ROWS, 1))
    figures, (text,) = judged(reference, np.zeros_like(reference))
    assert figures.vanished is not None
    assert figures.vanished.axis is None
    assert text.startswith("the output is 0 throughout and up to")
    assert violations(figures, Budget(max_abs_error=2.0)) == []


def test_other_samples_use_the_kinds_of_the_users_samples() -> None:
    reference = detector()
    units = recorded_units(compare(reference, reference))
    other = reference[:1, :1] / 100  # whose own kinds one row does not tell
    sound = compare(other, halved(other), units.for_other_samples(other))
    assert adversarial_violations(sound, 640, Budget()) == []
    broken = other + np.r_[np.zeros(4), np.full(18, 0.2)].astype(np.float32)
    (text,) = adversarial_violations(compare(other, broken, units.for_other_samples(other)), 640, Budget())
    assert text.startswith("max error 0.2 in column")
