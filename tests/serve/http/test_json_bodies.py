from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.http import json_bodies as fields
from halfserve.serve.http.json_bodies import LONG, MAX_VALUES, TooManyValuesError, loads

PIECES = ['"data"', ":", "[", "]", "{", "}", ",", " ", "1", "-2.5e3", "7", '"a"', '\\"', "null", '"x, "']
NUMBERS = st.lists(st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False), max_size=30)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            b"{",
            "the body is not JSON: Expecting property name enclosed in double quotes at line 1, column 2; expected an object",
        ),
        (b"\xff\xfe", "the body is not UTF-8 text; expected JSON"),
        (b"[1]", r"the body is \[1\], expected a JSON object"),
        (b"", "the body is not JSON: Expecting value at line 1, column 1"),
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
        (lambda c: fields.base64_bytes(c, "a", "x"), {"a": "%"}, "x has a that is not base64; expected base64 of bytes"),
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
        with pytest.raises(InvalidArgumentError, match="not base64"):
            fields.base64_bytes({"a": wrong}, "a", "x")


def test_no_more_is_written_of_a_wrong_value_than_is_shown() -> None:
    unwritable = object()
    for value in ([1] * 100 + [unwritable], {"a": {"b": [[0] * 100, unwritable]}}):
        with pytest.raises(InvalidArgumentError, match=r"x has a .*\.\.\., expected text"):
            fields.text({"a": value}, "a", "x")


def outcome(read: Any, text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        return ValueError


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example('{"data":[1,,2]}')
@example('{"data":[1,2,]}')
@example('{"data":[ , ]}')
@example('{"data":[]}')
@example('{"data":[1 2]}')
@example('{"a":"x,"data":[1,2],"b":2}')
@example('{"a":"\\",\\"data\\":[1,2]"}')
def test_loads_accepts_exactly_what_json_accepts(text: str) -> None:
    assert outcome(lambda t: loads(t, long=1, piece=1), text) == outcome(json.loads, text)


@given(data=NUMBERS, indent=st.sampled_from([None, 1]), long=st.integers(1, 40))
def test_lists_are_read_in_pieces_of_any_size(data: list[float], indent: int | None, long: int) -> None:
    content = {"inputs": [{"name": "data", "data": data}, {"data": [data, data]}, {"data": {"data": data}}]}
    assert loads(json.dumps(content, indent=indent), long=long, piece=long) == content


def test_integers_beyond_64_bits_are_floats_in_long_lists() -> None:
    content = loads('{"data": [18446744073709551616, -1, 1e400]}', long=1)
    assert content == {"data": [2.0**64, -1, float("inf")]}
    assert [type(value) for value in content["data"]] == [int, int, float], "orjson leaves such a piece to json"
    assert loads('{"data": [18446744073709551616]}', long=1)["data"] == [2.0**64]


def test_values_are_counted_but_for_flat_lists_of_numbers() -> None:
    numbers = [1] * (MAX_VALUES + 10)
    assert loads(json.dumps({"inputs": [{"data": numbers}]})) == {"inputs": [{"data": numbers}]}
    assert loads("[[]" + ",[]" * (MAX_VALUES // 2 - 1) + "]") == [[]] * (MAX_VALUES // 2)
    for text in ("[1" + ",1" * MAX_VALUES + "]", "[[]" + ",[]" * (MAX_VALUES // 2) + "]", '["' + "," * MAX_VALUES + '"]'):
        with pytest.raises(TooManyValuesError):
            loads(text)


@pytest.mark.parametrize("count", [10, 100_000])
def test_documents_of_any_length_are_read(count: int) -> None:
    content = {"inputs": [{"data": [i / 7 for i in range(count)]}], "id": "data"}
    text = json.dumps(content)
    assert (len(text) > LONG) == (count > 10)
    assert loads(text) == content
