from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos.datatypes import BY_WIRE, DATATYPES
from halfserve.serve.http.json_bodies import LONG, loads
from halfserve.serve.http.json_tensors import PIECE, array_from_json, array_to_json, json_pieces
from halfserve.serve.protocol.raw_tensors import from_raw, to_raw


def read(data: Any, wire: str, shape: list[int]) -> np.ndarray[Any, Any]:
    return array_from_json(data, BY_WIRE[wire], shape)


def wide(patterns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """BF16 as FP32: its bits are the upper half."""
    return (patterns.astype("<u4") << 16).view("<f4")


@given(
    wire=st.sampled_from([row.wire for row in DATATYPES if row.itemsize is not None and row.wire != "BOOL"]),
    seed=st.binary(min_size=64, max_size=64),
    rows=st.sampled_from([1, 2, 4]),
)
def test_every_bit_pattern_survives_json(wire: str, seed: bytes, rows: int) -> None:
    datatype = BY_WIRE[wire]
    assert datatype.itemsize is not None
    shape = [rows, len(seed) // datatype.itemsize // rows]
    array = from_raw(seed, datatype, shape)
    data = json.loads(b"".join(json_pieces(array, datatype)), parse_constant=pytest.fail)
    back = from_raw(to_raw(array_from_json(data, datatype, shape), datatype), datatype, shape)
    assert back.dtype == array.dtype
    # NaNs have many patterns, and JSON one.
    seen, expected = (a if datatype.numpy is not None else wide(a) for a in (back, array))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(seen, expected)


@given(st.lists(st.text(max_size=8), max_size=6))
def test_texts_survive(texts: list[str]) -> None:
    array = read(texts, "BYTES", [len(texts)])
    assert array_to_json(array, BY_WIRE["BYTES"]) == texts


def test_nested_and_flat_data_are_the_same() -> None:
    np.testing.assert_array_equal(read([[1, 2], [3, 4]], "FP16", [2, 2]), read([1, 2, 3, 4], "FP16", [2, 2]))


@pytest.mark.parametrize(
    ("data", "wire", "shape", "expected"),
    [
        (5, "INT32", [], 5),
        ([5], "INT32", [], 5),
        ([True, 0, 1], "BOOL", [3], [True, False, True]),
        ([], "INT8", [0, 3], []),
        ([], "BYTES", [0], []),
        ([2**64 - 1], "UINT64", [1], [2**64 - 1]),
        ([-(2**63)], "INT64", [1], [-(2**63)]),
    ],
    ids=range(7),
)
def test_scalars_flags_and_large_numbers_are_read(data: Any, wire: str, shape: list[int], expected: Any) -> None:
    array = read(data, wire, shape)
    assert (list(array.shape), array.tolist()) == (shape, expected)


def test_special_values_are_texts() -> None:
    array = read(["NaN", "Infinity", "-Infinity", 1], "FP16", [4])
    assert array_to_json(array, BY_WIRE["FP16"]) == ["NaN", "Infinity", "-Infinity", 1.0]


@pytest.mark.parametrize("indent", [0, LONG], ids=["small", "large"])
def test_special_values_may_be_named_as_python_does(indent: int) -> None:
    array = read(loads("[NaN, Infinity, -Infinity, 1.5]" + " " * indent), "FP32", [4])
    assert array_to_json(array, BY_WIRE["FP32"]) == ["NaN", "Infinity", "-Infinity", 1.5]


def test_64_bits_are_kept() -> None:
    assert array_to_json(np.array([-(2**63)]), BY_WIRE["INT64"]) == [-(2**63)]


@pytest.mark.parametrize(
    ("data", "wire", "shape", "text"),
    [
        ([1, 2], "FP32", [3], r"has 2 elements in data, expected 3 for shape \[3\]"),
        ([[1, 2, 3, 4]], "FP32", [2, 2], r"has data nested as \[1, 4\], expected \[2, 2\], or a flat list"),
        ([[1, 2], [3]], "FP32", [3], "has lists of different lengths in data, expected a full array"),
        ([1, None], "FP32", [2], "has the element None in data, expected numbers for FP32"),
        ([1, True], "FP32", [2], "has the element True in data, expected numbers for FP32"),
        ([1, "2"], "FP32", [2], "has the element '2' in data, expected numbers for FP32"),
        ([1, {}], "INT8", [2], "has the element {} in data, expected whole numbers for INT8"),
        ([1, 0.5], "INT8", [2], "has the element 0.5 in data, expected whole numbers for INT8"),
        ([1, 128], "INT8", [2], "has the element 128 in data, outside the range of INT8"),
        ([-1], "UINT64", [1], "has the element -1 in data, outside the range of UINT64"),
        ([65520], "FP16", [1], "has the element 65520 in data, outside the range of FP16"),
        ([1e39], "BF16", [1], r"has the element 1e\+39 in data, outside the range of BF16"),
        ([10**400], "FP64", [1], "has an element in data outside the range of FP64"),
        (loads("[1, -1e400]"), "FP32", [2], "has an element in data outside the range of FP32"),
        ([2], "BOOL", [1], "has the element 2 in data, expected true or false for BOOL"),
        ([1], "BYTES", [1], "has the element 1 in data, expected texts for BYTES"),
        (["\ud800"], "BYTES", [1], "has half of a surrogate pair in data, expected whole characters"),
    ],
    ids=range(17),
)
def test_what_does_not_fit_is_refused(data: Any, wire: str, shape: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(data, wire, shape)


def test_one_long_text_among_numbers_costs_no_more_than_itself() -> None:
    with pytest.raises(ValueError, match="expected numbers"):
        read(["x" * 10_000_000, *range(100_000)], "FP32", [100_001])  # as an array of texts: 4 TB


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match='not UTF-8 text; ask for it with "binary_data": true'):
        array_to_json(np.array([b"\xff"], object), BY_WIRE["BYTES"])


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1])
def test_long_lists_are_one_list(size: int) -> None:
    assert json.loads(b"".join(json_pieces(np.arange(size, dtype=np.int32), BY_WIRE["INT32"]))) == list(range(size))
