from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.files.varint import encoded_varint

ENCODED = [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\1"), (300, b"\xac\2"), (2**31, b"\x80\x80\x80\x80\x08")]


@pytest.mark.parametrize(("number", "encoded"), ENCODED, ids=[str(number) for number, _ in ENCODED])
def test_seven_bits_a_byte_and_the_lowest_first(number: int, encoded: bytes) -> None:
    assert encoded_varint(number) == encoded


@given(number=st.integers(0, 2**63 - 1))
def test_numbers_are_written_as_protobuf_writes_them(number: int) -> None:
    assert onnx.ModelProto(ir_version=number).SerializeToString() == b"\x08" + encoded_varint(number)
