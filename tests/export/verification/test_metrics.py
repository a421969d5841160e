from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from export.verification.choices import argmax_agreement
from export.verification.metrics import (
    Array,
    compare,
    compare_parts,
    cosine,
    non_finite_differences,
    ulp_distance,
)

halves = hnp.arrays(np.float16, st.integers(1, 20), elements=st.floats(-65504, 65504, width=16))
tables = hnp.arrays(np.float32, st.tuples(st.integers(1, 8), st.integers(2, 6)), elements=st.floats(-100, 100, width=32))


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


def test_zero_has_one_place() -> None:
    assert ulp_distance(np.array([-0.0]), np.array([0.0])).item() == 0
    assert ulp_distance(np.array([-(2.0**-24)]), np.array([2.0**-24])).item() == 2


@given(tables)
def test_a_table_agrees_with_itself(table: Array) -> None:
    figures = compare(table, table)
    assert figures.agreement == (1 if figures.rows else None)
    assert figures.rows + figures.constant_rows == len(table)
    assert figures.max_abs_error == figures.mean_rel_error == figures.max_ulp == figures.non_finite == 0
    assert figures.cosine == pytest.approx(1)


@given(tables, st.data())
def test_agreement_is_the_share_of_rows_left_alone(table: Array, data: st.DataObject) -> None:
    table = np.argsort(table, -1).astype(np.float32)  # no ties
    flipped = np.array(data.draw(st.lists(st.booleans(), min_size=len(table), max_size=len(table))))
    candidate = np.where(flipped[:, None], -table, table)
    assert argmax_agreement(table, candidate) == pytest.approx(1 - flipped.mean())


def test_a_choice_that_float16_cannot_see_is_no_disagreement() -> None:
    reference = np.array([[1.0, 1.0001, 0.0], [1.0, 1.1, 0.0]], np.float32)
    assert argmax_agreement(reference, reference[:, [1, 0, 2]]) == 0.5


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


def test_a_candidate_that_prefers_nothing_does_not_agree() -> None:
    reference = np.array([[2.0, 1.0], [3.0, 1.0]])  # class 0, which the argmax of a constant row is
    assert compare(reference, np.zeros((2, 2))).agreement == 0


def test_overflow_to_infinity_is_no_tie() -> None:
    reference = np.array([[1e6, 2e6]], np.float32)
    assert argmax_agreement(reference, np.full((1, 2), np.inf)) == 0


@pytest.mark.parametrize("place", [0, 1])
def test_a_row_in_which_one_of_the_two_has_nan_is_a_disagreement(place: int) -> None:
    sound, broken = np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([[1.0, 2.0], [1.0, 2.0]])
    broken[0, place] = np.nan
    assert argmax_agreement(sound, broken) == argmax_agreement(broken, sound) == 0.5
    assert argmax_agreement(broken, broken) == 1


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


def test_nothing_to_compare_is_no_success() -> None:
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


def test_integers_agree_where_they_are_equal() -> None:
    assert compare(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])).agreement == 0.75


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match=r"the candidate has shape \[3\], the reference \[2\]"):
        compare(np.zeros(2), np.zeros(3))


def test_rows_that_differ_are_counted_with_what_the_reference_prefers_its_choice_by() -> None:
    first, second = np.array([[1.0, 2.0, 0.0], [5.0, 2.0, 4.5]]), np.array([[1.0, 3.0, 0.0]])
    parts = [(first, np.array([[1.0, 2.0, 0.0], [4.0, 2.0, 4.5]])), (second, np.array([[3.25, 3.0, 0.0]]))]
    figures = compare_parts(parts)
    assert (figures.rows, figures.differing, figures.margin) == (3, 2, 2.0)
    assert figures.agreement == pytest.approx(1 / 3)


@pytest.mark.parametrize(("choice", "other"), [(np.inf, 1.0), (1.0, np.nan)])
def test_no_number_is_no_near_tie(choice: float, other: float) -> None:
    reference = np.array([[choice, other], [1.0, 2.0]])
    figures = compare(reference, np.array([[0.5, 1.0], [1.0, 2.0]]))
    assert (figures.differing, figures.margin) == (1, np.inf)


def test_whole_numbers_that_differ_are_no_near_tie() -> None:
    figures = compare(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]))
    assert (figures.rows, figures.differing, figures.margin) == (4, 1, np.inf)
