from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from serve.engine.precision_guard.drift import BOUNDS, OutputDrift, compare


def test_equal_answers_have_no_distance() -> None:
    reference = np.array([[1.0, 2.0], [4.0, -8.0]], np.float32)
    distance = compare(reference.astype(np.float16), reference)
    assert (distance.error, distance.scale, distance.rows, distance.agreeing) == (0.0, 8.0, 2, 2)


def test_the_error_is_the_largest_and_the_argmax_is_compared_by_row() -> None:
    answer = np.array([[1.0, 3.0], [5.0, 4.0]], np.float16)
    reference = np.array([[2.0, 1.0], [5.0, 3.5]], np.float32)
    distance = compare(answer, reference)
    assert (distance.error, distance.scale, distance.rows, distance.agreeing) == (2.0, 5.0, 2, 1)


def test_a_choice_that_fp16_cannot_tell_apart_agrees() -> None:
    reference = np.array([[1.0, 1.0001]], np.float32)
    assert compare(np.array([[1.0, 1.0]], np.float16), reference).agreeing == 1


@pytest.mark.parametrize("shape", [(5,), (5, 1), (0, 3)])
def test_where_there_is_nothing_to_choose_from_nothing_agrees(shape: tuple[int, ...]) -> None:
    distance = compare(np.ones(shape, np.float16), np.ones(shape, np.float32))
    assert (distance.rows, distance.agreeing) == (0, 0)


def test_images_have_their_classes_on_axis_1() -> None:
    reference = np.zeros((2, 3, 4, 5), np.float32)
    reference[:, 1] = 1
    distance = compare(reference.astype(np.float16), reference)
    assert (distance.rows, distance.agreeing) == (40, 40)


@pytest.mark.parametrize(("value", "expected"), [(np.nan, np.inf), (np.inf, np.inf), (7.0, 0.0)])
def test_a_value_that_only_one_of_the_two_has_is_infinitely_far(value: float, expected: float) -> None:
    reference = np.array([7.0, 1.0], np.float32)
    assert compare(np.array([value, 1.0], np.float16), reference).error == expected


def test_what_is_not_finite_in_both_alike_is_no_difference() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 2.0])
    assert compare(values.astype(np.float16), values.astype(np.float32)).error == 0.0
    assert compare(-values.astype(np.float16), values.astype(np.float32)).error == math.inf


def test_integers_agree_or_not() -> None:
    distance = compare(np.array([1, 2, 3]), np.array([1, 2, 4]))
    assert (distance.error, distance.rows, distance.agreeing) == (0.0, 3, 2)


def test_bfloat16_is_a_floating_dtype() -> None:
    reference = np.array([[1.001, 3.0]], np.float32)
    distance = compare(reference.astype(ml_dtypes.bfloat16), reference)
    assert 0 < distance.error < 0.01
    assert distance.scale == 3.0


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the answer has shape \[2\], the fp32 twin's \[3\]"):
        compare(np.zeros(2), np.zeros(3))


def test_an_answer_near_nothing_is_measured_by_what_the_output_is_else() -> None:
    drift = OutputDrift()
    ordinary = np.array([100.0], np.float32)
    assert drift.add(compare(ordinary.astype(np.float16), ordinary)) == 0.0
    small = np.array([1e-3], np.float32)
    assert drift.add(compare(np.array([2e-3], np.float16), small)) == pytest.approx(1e-5, rel=0.05)
    tiny = OutputDrift()
    assert tiny.add(compare(np.array([2e-7], np.float16), np.array([1e-7], np.float32))) < 0.01


def test_the_histogram_holds_every_run_once() -> None:
    drift = OutputDrift()
    reference = np.array([1.0], np.float32)
    for answer in (1.0, 1.0 + BOUNDS[9], 3.0, np.inf):
        drift.add(compare(np.array([answer]), reference))
    histogram = drift.histogram()
    assert sum(histogram.counts) == 4
    assert len(histogram.counts) == len(histogram.bounds) + 1
    assert (histogram.counts[0], histogram.counts[-1]) == (1, 2)
    assert histogram.total == pytest.approx(2.0 + BOUNDS[9])
