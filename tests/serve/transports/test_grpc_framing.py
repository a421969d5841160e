from __future__ import annotations

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.errors import InferenceError
from serve.transports.grpc_framing import MessageReader, frame

messages = st.lists(st.binary(max_size=40), max_size=6)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def compressed(payload: bytes) -> bytes:
    return b"\1" + len(payload).to_bytes(4, "big") + payload


@given(messages, st.lists(st.integers(0, 400), max_size=10))
def test_messages_survive_any_cutting(sent: list[bytes], places: list[int]) -> None:
    reader = MessageReader(1000)
    pieces = cut(b"".join(map(frame, sent)), places)
    assert [message for piece in pieces for message in reader.feed(piece)] == sent
    reader.finish()
    assert reader.held_bytes == 0


@given(st.binary(max_size=40), st.integers(1, 44))
def test_half_a_message_is_held_and_reported(message: bytes, kept: int) -> None:
    data = frame(message)[: min(kept, len(message) + 4)]
    reader = MessageReader(1000)
    assert list(reader.feed(data)) == []
    assert reader.held_bytes == len(data)
    with pytest.raises(InferenceError, match=rf"the call ended inside a message: {len(data)} bytes came"):
        reader.finish()


@given(st.binary(max_size=200), st.sampled_from([b"gzip", b"deflate"]))
def test_compressed_messages_are_inflated(message: bytes, encoding: bytes) -> None:
    reader = MessageReader(200, encoding)
    payload = gzip.compress(message) if encoding == b"gzip" else zlib.compress(message)
    sent = compressed(payload) + frame(b"plain")
    assert list(reader.feed(sent)) == [message, b"plain"]


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_give_messages_or_an_error_of_ours(first: bytes, second: bytes) -> None:
    reader = MessageReader(50, b"gzip")
    try:
        for piece in (first, second):
            assert all(len(message) <= 50 for message in reader.feed(piece))
        reader.finish()
    except InferenceError:
        pass


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        (frame(bytes(20_001)), None, "a message of 20001 bytes is too large, expected at most 20000; split the request"),
        (compressed(gzip.compress(bytes(10_000_000), mtime=0)), b"gzip", "a message of more than 20000 bytes is too large"),
        (compressed(b"x"), None, "a message is marked as compressed, the call names no grpc-encoding; expected one"),
        (b"\2" + compressed(b"x")[1:], b"gzip", "a message begins with the flag 2, expected 0 (plain) or 1 (compressed)"),
        (compressed(b"x"), b"br", "grpc-encoding 'br' is not known here; expected one of identity,deflate,gzip"),
        (compressed(b"no gzip"), b"gzip", "a message does not decompress as gzip"),
        (compressed(gzip.compress(b"hello", mtime=0)[:-9]), b"gzip", "a message ends inside its gzip data"),
        (compressed(gzip.compress(b"hello", mtime=0) + b"no gzip"), b"gzip", "a message does not decompress as gzip"),
        (compressed(zlib.compress(b"hello") + b"more"), b"deflate", "a message has 4 bytes behind its deflate data"),
    ],
)
def test_what_is_wrong_with_a_message_is_said(data: bytes, encoding: bytes | None, text: str) -> None:
    with pytest.raises(InferenceError) as refused:
        list(MessageReader(20_000, encoding).feed(data))
    assert text in str(refused.value)


def test_what_comes_compressed_has_a_limit_of_its_own() -> None:
    reader = MessageReader(20_000, b"gzip", 1000)
    assert list(reader.feed(compressed(gzip.compress(bytes(1000))) + frame(bytes(20_000)))) == [bytes(1000), bytes(20_000)]
    with pytest.raises(
        InferenceError, match="of more than 1000 bytes is too large, expected at most 1000; send it uncompressed"
    ):
        list(reader.feed(compressed(gzip.compress(bytes(10_000_000)))))


def test_a_length_over_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(InferenceError, match="a message of 4294967295 bytes is too large"):
        list(MessageReader(2**31 - 1).feed(b"\0\xff\xff\xff\xff"))
