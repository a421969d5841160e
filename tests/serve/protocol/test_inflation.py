from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.errors import InvalidArgumentError, MessageTooLargeError
from serve.protocol.inflation import MAX_MEMBERS, PIECE_BYTES, inflate

HOW: dict[str, Any] = {"what": "the body", "advice": "send less"}


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_members_of_gzip_follow_each_other(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert inflate(b"".join(map(gzip.compress, parts)), "gzip", len(whole), **HOW) == whole


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_takes_several_pieces_is_put_together(coding: str, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    sent = gzip.compress(body, 0) if coding == "gzip" else zlib.compress(body, 0)
    assert inflate(sent, coding, size, **HOW) == body
    with pytest.raises(MessageTooLargeError, match=f"of more than {size - 1} bytes is too large, .* {size - 1}; send less"):
        inflate(sent, coding, size - 1, **HOW)


def test_members_share_the_limit() -> None:
    with pytest.raises(MessageTooLargeError, match="of more than 100 bytes is too large, expected at most 100; send less"):
        inflate(gzip.compress(bytes(60)) * 2, "gzip", 100, **HOW)


def test_members_that_hold_nothing_are_bounded() -> None:
    empty = gzip.compress(b"")
    assert inflate(empty * MAX_MEMBERS, "gzip", 1, **HOW) == b""
    with pytest.raises(InvalidArgumentError, match="the body has 20 bytes behind its gzip data; expected none"):
        inflate(empty * (MAX_MEMBERS + 1), "gzip", 1, **HOW)


@pytest.mark.parametrize(
    ("sent", "coding", "text"),
    [
        (b"", "gzip", "the body ends inside its gzip data; send all of it"),
        (gzip.compress(b"a")[:-1], "gzip", "the body ends inside its gzip data; send all of it"),
        (gzip.compress(b"a") * 2 + b"junk", "gzip", "the body does not decompress as gzip"),
        (zlib.compress(b"a") * 2, "deflate", "the body has 9 bytes behind its deflate data; expected none"),
        (b"junk", "deflate", "the body does not decompress as deflate; expected what its encoding says"),
    ],
    ids=range(5),
)
def test_what_is_not_whole_or_followed_by_something_else_is_refused(sent: bytes, coding: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        inflate(sent, coding, 100, **HOW)
