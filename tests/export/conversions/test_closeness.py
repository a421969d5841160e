from __future__ import annotations

import numpy as np
import pytest

from tests.export.conversions.closeness import difference, right_elements

pytestmark = pytest.mark.long


def test_what_float16_rounds_is_right_and_what_it_does_not_is_wrong() -> None:
    reference = np.linspace(-3, 3, 101, dtype=np.float32)
    assert difference(reference.astype(np.float16), [reference]) is None
    assert difference(reference + np.float32(0.05), [reference]) is not None


def test_one_wrong_element_is_named() -> None:
    reference = np.arange(6, dtype=np.float32).reshape(2, 3)
    wrong = reference.copy()
    wrong[1, 2] = 9
    assert difference(wrong, [reference]) == "1 of 6 elements, the first at [1, 2]: 9.0 instead of 5.0"


def test_either_reference_will_do_element_by_element() -> None:
    plain, coarse = np.array([0, 1], np.int64), np.array([5, 6], np.int64)
    assert difference(np.array([0, 6]), [plain, coarse]) is None
    assert difference(np.array([0, 7]), [plain, coarse]) is not None


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (np.inf, 1e6, True),
        (65504.0, 1e6, True),
        (-np.inf, 1e6, False),
        (np.nan, 1e6, False),
        (np.inf, 60000.0, False),
        (np.inf, np.inf, True),
        (65504.0, np.inf, False),
        (np.nan, np.nan, True),
        (0.0, np.nan, False),
        (0.0, 3e-8, True),
        (0.0, 1e-3, False),
    ],
)
def test_the_ends_of_float16(answer: float, reference: float, right: bool) -> None:
    found = right_elements(np.array([answer], np.float32), np.array([reference], np.float32))
    assert found.tolist() == [right]


def test_an_overflow_beside_it_excuses_no_other_element() -> None:
    reference = np.array([1e30, 1.0], np.float32)
    assert right_elements(np.array([np.inf, 200.0], np.float32), reference).tolist() == [True, False]


def test_integers_and_booleans_are_equal_or_wrong() -> None:
    assert difference(np.array([1, 2]), [np.array([1, 3])]) is not None
    assert difference(np.array([True]), [np.array([True])]) is None


def test_shapes_sequences_and_optionals() -> None:
    one = np.ones(2, np.float32)
    assert difference(np.ones(3, np.float32), [one]) == "shape [3] instead of [2]"
    assert difference([one, one], [[one, one]]) is None
    assert difference([one], [[one, one]]) == "a sequence has 1 elements instead of 2"
    assert difference([one, one * 2], [[one, one]]) == "element 1: 2 of 2 elements, the first at [0]: 2.0 instead of 1.0"
    assert difference(None, [None]) is None
    assert difference(one, [None]) is not None
