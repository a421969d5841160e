from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.transports.grpc_framing import frame
from serve.transports.nghttp2.growing_message import ALIGNED_BYTES, GrowingMessage


def grown(pieces: list[bytes], max_bytes: int = 2**20) -> GrowingMessage:
    growing = GrowingMessage.begun(pieces[0], max_bytes)
    assert growing is not None
    for piece in pieces[1:]:
        assert growing.add(memoryview(piece))
    return growing


@given(st.binary(max_size=500), st.lists(st.integers(5, 400), max_size=8))
def test_a_message_in_pieces_is_what_it_was_at_each_of_them(message: bytes, cuts: list[int]) -> None:
    whole = frame(message)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[start:end] for start, end in pairwise(places)]
    for number in range(1, len(pieces) + 1):
        growing = grown(pieces[:number])
        assert growing.so_far() == whole[: places[number]]
        assert growing.came == places[number]
        assert growing.is_whole == (places[number] == len(whole))
    assert growing.message == message
    assert growing.message.readonly


@pytest.mark.parametrize("length", [1, 15, 16, 301_087])
def test_its_end_lies_where_arrays_want_theirs(length: int) -> None:
    view = grown([frame(bytes(length))]).message
    assert (np.frombuffer(view, np.uint8).ctypes.data + length) % ALIGNED_BYTES == 0


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"\0\0\0\0", id="less than its length"),
        pytest.param(b"\1" + frame(b"x")[1:], id="compressed"),
        pytest.param(frame(bytes(101)), id="too large"),
        pytest.param(frame(b"x") + b"y", id="more than it has"),
    ],
)
def test_what_is_no_plain_message_of_a_known_length_is_not_begun(piece: bytes) -> None:
    assert GrowingMessage.begun(piece, 100) is None


def test_more_than_it_has_is_not_taken() -> None:
    growing = grown([frame(b"abc")[:6]])
    assert not growing.add(b"bcd")
    assert growing.so_far() == frame(b"abc")[:6]
    assert growing.add(b"bc")
    assert bytes(growing.message) == b"abc"
