from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np
from tritonclient.utils import serialize_byte_tensor

from halfserve.protos.datatypes import BY_WIRE, DATATYPES, Datatype
from halfserve.serve.protocol.raw_tensors import from_raw, to_raw

NUMERIC = [row for row in DATATYPES if row.numpy is not None and row.wire != "BYTES"]
shapes = st_np.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Datatype, np.ndarray[Any, Any]]:
    row = draw(st.sampled_from(NUMERIC))
    assert row.numpy is not None
    return row, draw(st_np.arrays(row.numpy, shapes))


@given(tensors())
def test_numbers_come_back_bit_for_bit(tensor: tuple[Datatype, np.ndarray[Any, Any]]) -> None:
    row, array = tensor
    raw = to_raw(array, row)
    assert len(raw) == array.size * int(row.itemsize or 0)
    back = from_raw(raw, row, array.shape)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_bytes_come_back_and_are_what_tritonclient_sends(elements: list[bytes]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    raw = to_raw(array, BY_WIRE["BYTES"])
    if elements:
        assert raw == serialize_byte_tensor(array).item()
    assert list(from_raw(raw, BY_WIRE["BYTES"], [len(elements)])) == elements


@given(st.binary(max_size=40), st.sampled_from(DATATYPES), st.lists(st.integers(0, 5), max_size=3))
def test_any_bytes_are_an_array_of_the_shape_or_a_value_error(raw: bytes, row: Datatype, shape: list[int]) -> None:
    try:
        array = from_raw(raw, row, shape)
    except ValueError as refused:
        message = str(refused)
        assert "expected" in message
    else:
        assert list(array.shape) == shape


def test_a_wrong_byte_count_names_both() -> None:
    with pytest.raises(ValueError, match=r"has 6 bytes, expected 8 for FP16 of shape \[2, 2\]"):
        from_raw(bytes(6), BY_WIRE["FP16"], [2, 2])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x02\x00\x00", "ends inside BYTES element 0"),
        (b"\x01\x00\x00\x00a\xff\xff\xff\xffb", "ends inside BYTES element 1"),
        (b"\x01\x00\x00\x00a", r"has 1 BYTES elements, expected 2 for shape \[2\]"),
        (bytes(13), r"has more than 2 BYTES elements, expected 2 for shape \[2\]"),
    ],
)
def test_broken_bytes_elements_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_raw(raw, BY_WIRE["BYTES"], [2])


def test_any_non_zero_byte_is_true() -> None:
    assert from_raw(b"\x00\x01\x02\xff", BY_WIRE["BOOL"], [4]).tolist() == [False, True, True, True]


def test_bf16_comes_as_bit_patterns() -> None:
    array = from_raw(b"\x80\x3f", BY_WIRE["BF16"], [1])
    assert (array.dtype, array.tolist()) == (np.dtype(np.uint16), [0x3F80])
    assert to_raw(array, BY_WIRE["BF16"]) == b"\x80\x3f"


def test_numbers_are_views_on_the_received_bytes() -> None:
    raw = bytes(64)
    array = from_raw(raw, BY_WIRE["FP16"], [2, 16])
    assert not array.flags.owndata
    assert not array.flags.writeable
