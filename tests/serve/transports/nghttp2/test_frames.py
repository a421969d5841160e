from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ngh2 import Connection, NGH2Error, RequestReceived, Role

from halfserve.serve.transports.nghttp2.frames import (
    AUTHORITY,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    METHOD_POST,
    PATH_ROOT,
    SCHEME_HTTP,
    head_of,
    literal,
    literals,
    repeats,
)
from tests.serve.transports.nghttp2.http2_peer import call_headers

Fields = list[tuple[bytes, bytes]]
NAMES = st.from_regex(rb"x-[a-z0-9]{1,40}", fullmatch=True)
VALUES = st.from_regex(rb"[!-~]{0,300}", fullmatch=True)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
REQUEST = METHOD_POST + SCHEME_HTTP + PATH_ROOT + AUTHORITY + literal(b"x")


class Reader:
    """libnghttp2 as who reads blocks."""

    def __init__(self) -> None:
        self._http2 = Connection(Role.SERVER)
        self._http2.initiate_connection()
        client = Connection(Role.CLIENT)
        client.initiate_connection()
        self._http2.receive_data(client.data_to_send())
        self._http2.events()
        self._stream = -1

    def read(self, block: bytes) -> Fields:
        self._stream += 2
        self._http2.receive_data(head_of(HEADERS, END_HEADERS | END_STREAM, self._stream, len(block)) + block)
        (received,) = [event for event in self._http2.events() if isinstance(event, RequestReceived)]
        return list(received.headers)


def blocks_of(requests: list[Fields]) -> list[bytes]:
    """What a client sends for these, one after the other on one connection."""
    client, blocks = Connection(Role.CLIENT), []
    client.initiate_connection()
    client.data_to_send()
    for fields in requests:
        client.send_request(call_headers() + fields, end_stream=True)
        blocks.append(client.data_to_send()[9:])
    return blocks


@given(FIELDS)
def test_literals_are_read_as_they_were_written(fields: Fields) -> None:
    expected = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"x"), *fields]
    reader = Reader()
    assert [reader.read(REQUEST + literals(fields)) for _ in range(2)] == [expected] * 2
    assert repeats(REQUEST + literals(fields))


@pytest.mark.long
@given(st.lists(FIELDS, min_size=1, max_size=5), st.data())
def test_what_repeats_means_the_same_whenever_it_comes_and_leaves_the_others_their_meaning(
    different: list[Fields], data: st.DataObject
) -> None:
    requests = data.draw(st.lists(st.sampled_from(different), min_size=1, max_size=12))
    plain, repeating = Reader(), Reader()
    for fields, block in zip(requests, blocks_of(requests), strict=True):
        expected = call_headers() + fields
        assert plain.read(block) == expected
        for _ in range(3 if repeats(block) else 1):
            assert repeating.read(block) == expected


def test_the_third_of_equal_requests_repeats() -> None:
    assert [repeats(block) for block in blocks_of([[]] * 3)] == [False, True, True]


@pytest.mark.parametrize(
    "block",
    [
        b"\x40\x01a\x01b",  # to be remembered
        b"\x3f\xe1\x1f",  # the table's new size
        b"\x00\x01a\x05b",  # ends inside of a value
        b"\x00\x7f",  # ends inside of a length
        b"\xff",  # ends inside of an index
        b"\x0f",
    ],
)
def test_what_changes_the_table_or_is_cut_off_does_not_repeat(block: bytes) -> None:
    assert not repeats(block)
    assert not repeats(REQUEST + block)


@given(st.binary(max_size=40))
def test_any_bytes_that_repeat_are_read_or_refused_twice_the_same(block: bytes) -> None:
    if repeats(block):
        outcomes = []
        reader = Reader()
        for _ in range(2):
            try:
                outcomes.append(reader.read(REQUEST + block))
            except (NGH2Error, ValueError):
                outcomes.append([])
                reader = Reader()
        assert outcomes[0] == outcomes[1]
