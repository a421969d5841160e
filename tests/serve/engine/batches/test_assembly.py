from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.batches.assembly import SCRATCH_BYTES, assemble
from serve.engine.batches.raw_inputs import RawInput, RawInputs, RawLayout
from serve.engine.queueing.padding import pad_rows
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array, Tensors

Make = Callable[[Array], Tensors]


def arrays(x: Array) -> Tensors:
    """As a request has them that was parsed."""
    return {"x": x}


def raw(x: Array, before: int = 3) -> RawInputs:
    """As a request has them whose bytes are still there."""
    entry = RawInput("x", x.dtype, x.shape, x.size, x.nbytes)
    return RawInputs(RawLayout((entry,)), bytes(before) + x.tobytes() + b"!", (before,))


def elsewhere(x: Array) -> RawInputs:
    """As a request has them whose bytes lie in shared memory."""
    entry = RawInput("x", x.dtype, x.shape, x.size, x.nbytes)

    def read(target: memoryview) -> None:
        target[:] = x.tobytes()

    return RawInputs(RawLayout((entry,)), b"", (0,), (read,))


def request(inputs: Tensors, rows: int) -> InferRequest:
    return InferRequest(inputs=inputs, outputs=("y",), rows=rows, bucket=1, deadline=None, done=lambda _: None)


makers = st.sampled_from([arrays, raw, partial(raw, before=4), elsewhere])


@given(
    st.lists(st.tuples(makers, st.integers(1, 3)), min_size=1, max_size=5),
    st.sampled_from([1, 7, SCRATCH_BYTES // 4]),
    st.sampled_from([np.float16, np.float32]),
    st.integers(0, 20),
)
def test_a_batch_holds_all_rows_in_order(sources: list[tuple[Make, int]], width: int, dtype: Any, padded: int) -> None:
    start, requests, expected = 0, [], []
    for make, rows in sources:
        x = np.arange(start, start + rows * width).reshape(rows, width).astype(np.float16)
        start += 1000
        requests.append(request(make(x), rows))
        expected.append(x)
    batch = assemble(requests, "x", np.dtype(dtype), padded)
    assert batch.dtype == dtype
    assert batch.flags.aligned
    whole = np.concatenate(expected)
    np.testing.assert_array_equal(batch[: len(whole)], whole)
    np.testing.assert_array_equal(pad_rows(batch, padded), pad_rows(whole, padded))


def test_the_next_large_batch_uses_the_same_memory() -> None:
    x = np.ones((2, SCRATCH_BYTES), np.float16)
    first = assemble([request(raw(x), 2), request(raw(x), 2)], "x", x.dtype)
    second = assemble([request(raw(x + x), 2), request(raw(x), 2)], "x", x.dtype)
    assert np.shares_memory(first, second)
    assert (second[:2] == 2).all()


@pytest.mark.parametrize("count", [1, 2])
def test_a_large_batch_is_filled_up_where_it_lies(count: int) -> None:
    x = np.ones((1, SCRATCH_BYTES), np.float16)
    batch = assemble([request(raw(x, before=4), 1) for _ in range(count)], "x", x.dtype, 4)
    assert batch.shape == (4, SCRATCH_BYTES)
    assert (batch == 1).all()
    assert np.shares_memory(batch, assemble([request(raw(x), 1)] * 2, "x", x.dtype))


def test_one_aligned_request_is_not_copied() -> None:
    inputs = raw(np.ones((1, SCRATCH_BYTES), np.float16), before=4)
    assert np.shares_memory(assemble([request(inputs, 1)], "x", np.dtype(np.float16)), inputs["x"])


def test_rows_without_elements_are_rows() -> None:
    empty = np.ones((2, 0), np.float32)
    assert assemble([request(raw(empty), 2), request(raw(empty), 2)], "x", empty.dtype).shape == (4, 0)


@pytest.mark.parametrize("width", [2, SCRATCH_BYTES])
def test_bytes_that_cannot_be_fetched_fail_the_batch(width: int) -> None:
    def gone(target: memoryview) -> None:
        raise KeyError(len(target))

    entry = RawInput("x", np.dtype(np.float16), (1, width), width, 2 * width)
    inputs = RawInputs(RawLayout((entry,)), b"", (0,), (gone,))
    with pytest.raises(KeyError, match=str(2 * width)):
        assemble([request(inputs, 1), request(inputs, 1)], "x", np.dtype(np.float16))


def test_raw_inputs_are_a_mapping_of_read_only_views() -> None:
    inputs = raw(np.arange(3, dtype=np.int32).reshape(1, 3))
    assert (list(inputs), len(inputs), inputs["x"].tolist()) == (["x"], 1, [[0, 1, 2]])
    assert not inputs["x"].flags.writeable
    with pytest.raises(KeyError):
        inputs["y"]
