from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from serve.engine.errors import InvalidArgumentError
from serve.http import json_fields as fields


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            b"{",
            "the body is no JSON: Expecting property name enclosed in double quotes at line 1, column 2; expected an object",
        ),
        (b"\xff\xfe", "the body is no UTF-8 text; expected JSON"),
        (b"[1]", r"the body is \[1\], expected a JSON object"),
        (b"", "the body is no JSON: Expecting value at line 1, column 1"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "too long a number"),
    ],
    ids=["cut", "bytes", "list", "empty", "deep", "long"],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        fields.parse_object(body)


def test_an_empty_body_may_stand_for_no_fields() -> None:
    assert fields.parse_object(b" \n", empty=True) == {}


@pytest.mark.parametrize(
    ("read", "content", "text"),
    [
        (lambda c: fields.text(c, "a", "x"), {}, "x has no 'a', expected text"),
        (lambda c: fields.text(c, "a", "x"), {"a": 5}, "x has a 5, expected text"),
        (lambda c: fields.whole(c, "a", "x"), {"a": True}, "x has a true, expected a whole number"),
        (lambda c: fields.whole(c, "a", "x"), {"a": -1}, "x has a -1, expected 0 or more"),
        (lambda c: fields.items(c, "a", "x"), {"a": {}}, "x has a {}, expected a list"),
        (lambda c: fields.members(c, "a", "x"), {"a": "b" * 90}, r'x has a "b{39}\.\.\., expected an object'),
        (lambda c: fields.flag(c, "a", "x"), {"a": 1}, "x has a 1, expected true or false"),
        (lambda c: fields.shape(c, "x"), {"shape": [1, -1]}, r"x has shape \[1, -1\], expected a list of sizes"),
        (lambda c: fields.shape(c, "x"), {"shape": [1.0]}, r"x has shape \[1.0\], expected a list of sizes"),
        (lambda c: fields.each_object(c["a"], "outputs"), {"a": [3]}, "an entry of outputs is 3, expected an object"),
        (lambda c: fields.base64_bytes(c, "a", "x"), {"a": "%"}, "x has a that is no base64; expected bytes in it"),
    ],
    ids=range(11),
)
def test_a_wrong_field_is_named(read: Callable[[Any], object], content: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        read(content)


def test_right_fields_are_read() -> None:
    content = fields.parse_object('{"t": "ä", "n": 3, "l": [1], "o": {"f": true}, "shape": [2, 0], "b": "AAE="}'.encode())
    assert fields.text(content, "t", "x") == "ä"
    assert fields.whole(content, "n", "x") == 3
    assert fields.whole(content, "absent", "x", 7) == 7
    assert fields.items(content, "l", "x") == [1]
    assert fields.flag(fields.members(content, "o", "x"), "f", "x") is True
    assert fields.shape(content, "x") == [2, 0]
    assert fields.base64_bytes(content, "b", "x") == b"\0\1"


def test_long_base64_is_read_in_pieces() -> None:
    content = bytes(range(256)) * 3000
    encoded = base64.b64encode(content + b"!").decode()
    assert len(encoded) > 2 * fields.BASE64_PIECE
    assert fields.base64_bytes({"a": encoded}, "a", "x") == content + b"!"
    padded = "QQ==".rjust(fields.BASE64_PIECE, "A")  # where the first piece ends
    assert fields.base64_bytes({"a": padded}, "a", "x") == base64.b64decode(padded)
    for wrong in (padded + "QUFB", encoded[:-1], encoded[:-3] + "\n=="):
        with pytest.raises(InvalidArgumentError, match="no base64"):
            fields.base64_bytes({"a": wrong}, "a", "x")


def test_no_more_is_written_of_a_wrong_value_than_is_shown() -> None:
    unwritable = object()
    for value in ([1] * 100 + [unwritable], {"a": {"b": [[0] * 100, unwritable]}}):
        with pytest.raises(InvalidArgumentError, match=r"x has a .*\.\.\., expected text"):
            fields.text({"a": value}, "a", "x")
