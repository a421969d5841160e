from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfserve.protos.datatypes import BY_WIRE
from halfserve.serve.engine.precision_guard.non_finite import (
    BYTES_ELEMENTS,
    FLAGS_ELEMENTS,
    TWO_PASSES_ELEMENTS,
    VDOT_ELEMENTS,
    bad_stretches,
    check_of,
    count_non_finite,
    has_non_finite,
    non_finite_mask,
)
from halfserve.serve.engine.tensors import Array

BITS = hnp.arrays(np.uint16, hnp.array_shapes(max_dims=3, max_side=9))
DTYPES = {"FP16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def is_bad(wire: str, array: Array) -> bool:
    check = check_of(BY_WIRE[wire])
    assert check is not None
    return check(array)


@settings(max_examples=40)
@given(bits=BITS, wire=st.sampled_from(sorted(DTYPES)))
def test_any_bits_of_16_are_judged_as_numpy_does(bits: Array, wire: str) -> None:
    array = bits.view(DTYPES[wire])
    with np.errstate(invalid="ignore"):  # some NaNs make numpy say so
        expected = ~np.isfinite(array)
    assert (non_finite_mask(array) == expected).all()
    assert count_non_finite(array) == expected.sum()
    assert has_non_finite(array) == expected.any()
    assert is_bad(wire, array) == expected.any()


@settings(max_examples=40)
@given(array=hnp.arrays(st.sampled_from([np.float32, np.float64]), hnp.array_shapes(max_dims=3, max_side=9)))
def test_wider_numbers_are_judged_as_numpy_does(array: Array) -> None:
    wire = "FP32" if array.dtype == np.float32 else "FP64"
    assert is_bad(wire, array) == (not np.isfinite(array).all())
    assert count_non_finite(array) == np.count_nonzero(~np.isfinite(array))
    assert has_non_finite(array) == is_bad(wire, array)


@pytest.mark.parametrize("wire", ["FP16", "BF16", "FP32", "FP64"])
@pytest.mark.parametrize("elements", [1, 5, BYTES_ELEMENTS, VDOT_ELEMENTS, 3 * VDOT_ELEMENTS, 2 * TWO_PASSES_ELEMENTS])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_single_bad_value_is_found_at_any_place(wire: str, elements: int, value: float) -> None:
    array = np.ones(elements, DTYPES.get(wire) or BY_WIRE[wire].numpy)
    array[1::2] = -1
    assert not is_bad(wire, array)
    assert not has_non_finite(array, likely=True)
    for place in {0, elements // 2, elements - 1}:
        spoilt = array.copy()
        spoilt[place] = value
        assert is_bad(wire, spoilt)
        assert has_non_finite(spoilt, likely=True)
        assert count_non_finite(spoilt) == 1


def test_numbers_whose_squares_overflow_are_finite() -> None:
    assert not is_bad("FP32", np.full((3, 4), -3e38, np.float32))
    assert not is_bad("FP64", np.full(7, 1e308))
    assert not is_bad("FP16", np.array([65504, -65504, 6e-8], np.float16))


@pytest.mark.parametrize("wire", ["FP16", "FP32"])
def test_nothing_is_finite(wire: str) -> None:
    assert not is_bad(wire, np.zeros((0, 4), BY_WIRE[wire].numpy))


def test_integers_and_texts_are_not_looked_at() -> None:
    assert check_of(BY_WIRE["INT64"]) is None
    assert check_of(BY_WIRE["BYTES"]) is None
    texts = np.array([b"nan", b"inf"], object)
    assert count_non_finite(texts) == 0
    assert not has_non_finite(texts)
    assert bad_stretches(np.zeros((2, 3), np.int64), [1, 2]) == [False, False]


@settings(max_examples=40)
@given(data=st.data())
def test_each_stretch_of_rows_is_judged_by_itself(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))
    wide = data.draw(st.sampled_from([1, 3, FLAGS_ELEMENTS // 6]))
    dtype = data.draw(st.sampled_from([np.float16, np.float32, DTYPES["BF16"]]))
    array = np.ones((rows, wide), dtype)
    for row in data.draw(st.sets(st.integers(0, rows - 1))):
        array[row, data.draw(st.integers(0, wide - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    ends = sorted(data.draw(st.sets(st.integers(1, rows), min_size=1)))
    expected = [not np.isfinite(array[start:end]).all() for start, end in zip([0, *ends], ends, strict=False)]
    assert bad_stretches(array, ends) == expected
