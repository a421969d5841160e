from __future__ import annotations

import gzip
import zlib
from itertools import pairwise
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError
from halfserve.serve.protocol.status import Status
from halfserve.serve.transports.grpc_framing import (
    ALIGNED_BYTES,
    CUT,
    MAX_DETAILS,
    MessageReader,
    PartialMessage,
    cut_details,
    frame,
    refusal,
    timeout_seconds,
    trailers_of,
)

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


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), (b"2H", 7200), (b"3M", 180), (b"4S", 4), (b"250m", 0.25), (b"99999999u", 99.999999), (b"5n", 5e-9)],
)
def test_timeouts(header: bytes | None, seconds: float | None) -> None:
    assert timeout_seconds(header) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("header", [b"", b"5", b"S", b"-1S", b"123456789S", b"1.5S", b"5s", b"\xff"])
def test_a_timeout_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="grpc-timeout is .*, expected digits and a unit, as in 250m"):
        timeout_seconds(header)


@given(st.integers(0, 16), st.text(max_size=300))
def test_every_text_travels_in_ascii(code: int, details: str) -> None:
    details = details.encode("utf-8", "replace").decode()
    trailers = dict(trailers_of(Status(code, details)))
    assert trailers[b"grpc-status"] == str(code).encode()
    assert all(0x20 <= byte < 0x7F for byte in trailers[b"grpc-message"])
    assert unquote(trailers[b"grpc-message"].decode()) == details


@given(st.text(max_size=3), st.sampled_from(["x", "é", "€", "😀", "%", "a😀é"]))
def test_a_long_text_is_cut_by_what_it_takes_on_the_wire(start: str, unit: str) -> None:
    details = start.encode("utf-8", "replace").decode() + unit * 5000
    sent = dict(trailers_of(Status(3, details)))[b"grpc-message"]
    assert MAX_DETAILS - 12 < len(sent) <= MAX_DETAILS
    text = unquote(sent.decode(), errors="strict")
    assert text.endswith(CUT)
    assert details.startswith(text.removesuffix(CUT))


def test_a_text_that_just_fits_is_whole() -> None:
    assert cut_details("x" * MAX_DETAILS) == "x" * MAX_DETAILS
    assert cut_details("x" * (MAX_DETAILS + 1)) == "x" * (MAX_DETAILS - len(CUT)) + CUT


def test_trailers_of_a_status_go_along() -> None:
    assert (b"grpc-retry-pushback-ms", b"7") in trailers_of(Status(8, "full", (("grpc-retry-pushback-ms", "7"),)))
    assert (b"grpc-accept-encoding", b"identity,deflate,gzip") in trailers_of(Status(12, "no"))


def test_what_is_no_grpc_call_gets_a_plain_answer() -> None:
    call = {b":method": b"POST", b"content-type": b"application/grpc+proto"}
    assert refusal(call) is None
    assert (b":status", b"405") in (refusal({**call, b":method": b"GET"}) or [])


GRPC = ("application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8", "Application/gRPC")
OTHERS = ("", "text/html", "application/grpcfoo", "application/grpc-web", "application/grpc+", "grpc")


@pytest.mark.parametrize("value", GRPC + OTHERS)
def test_content_types_are_those_of_grpc(value: str) -> None:
    answer = refusal({b":method": b"POST", b"content-type": value.encode()})
    assert answer is None if value in GRPC else (b":status", b"415") in (answer or [])


def grown(pieces: list[bytes], max_bytes: int = 2**20) -> PartialMessage:
    growing = PartialMessage.starting_with(pieces[0], max_bytes)
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
    assert PartialMessage.starting_with(piece, 100) is None


def test_more_than_it_has_is_not_taken() -> None:
    growing = grown([frame(b"abc")[:6]])
    assert not growing.add(b"bcd")
    assert growing.so_far() == frame(b"abc")[:6]
    assert growing.add(b"bc")
    assert bytes(growing.message) == b"abc"
