from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve.http.large_json import LONG, MAX_VALUES, TooManyValuesError, loads

PIECES = ['"data"', ":", "[", "]", "{", "}", ",", " ", "1", "-2.5e3", "7", '"a"', '\\"', "null", '"x, "']
NUMBERS = st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_size=30)


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
def test_whatever_json_is_it_is_and_nothing_else(text: str) -> None:
    assert outcome(lambda t: loads(t, long=1), text) == outcome(json.loads, text)


@given(data=NUMBERS, indent=st.sampled_from([None, 1]), long=st.integers(1, 40))
def test_lists_are_read_in_pieces_of_any_size(data: list[float], indent: int | None, long: int) -> None:
    content = {"inputs": [{"name": "data", "data": data}, {"data": [data, data]}, {"data": {"data": data}}]}
    assert loads(json.dumps(content, indent=indent), long=long) == content


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
