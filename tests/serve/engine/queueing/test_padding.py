from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.queueing.padding import pad_rows, padded_rows


@pytest.mark.parametrize(("rows", "padded"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_a_batch_runs_as_the_next_size(rows: int, padded: int) -> None:
    assert padded_rows(rows, (4, 8)) == padded
    assert padded_rows(rows, ()) == rows


@given(st.integers(1, 6), st.integers(0, 6), st.sampled_from(["float16", "int64", "bool"]))
def test_what_is_added_repeats_the_last_row(rows: int, missing: int, dtype: str) -> None:
    array = np.arange(rows * 6).reshape(rows, 2, 3).astype(dtype)
    padded = pad_rows(array, rows + missing)
    assert (padded.shape, padded.dtype) == ((rows + missing, 2, 3), array.dtype)
    np.testing.assert_array_equal(padded[:rows], array)
    assert all((row == array[-1]).all() for row in padded[rows:])
    assert (padded is array) == (missing == 0)
