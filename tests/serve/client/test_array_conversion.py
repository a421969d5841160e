"""Conversion of arrays, lists and tensors of other libraries to the model's datatype, and classes from answers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfserve import Class, ClientError, classes_of
from halfserve.protos.datatypes import BY_WIRE, DATATYPES
from halfserve.serve.client.array_conversion import as_input, as_numpy, converted, datatype_named
from halfserve.serve.client.errors import InvalidRequest
from tests.serve.client.conftest import Connect
from tests.serve.running_server import RunningServer

WHERE = "input 'x'"
NUMERIC = [row for row in DATATYPES if row.numpy is not None and row.wire != "BYTES"]
INTEGERS = [row.wire for row in NUMERIC if row.numpy is not None and row.numpy.kind in "iu"]


@given(st.sampled_from(NUMERIC), st.sampled_from(NUMERIC), st.data())
def test_an_array_keeps_its_values_or_is_refused(source: Any, target: Any, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(source.numpy, (3,)))
    try:
        result = as_input(array, target, WHERE)
    except InvalidRequest as error:
        assert source is not target
        assert f"takes {target.wire}, but the array is {array.dtype}" in str(error)  # noqa: PT017  (only some pairs raise)
    else:
        assert result.dtype == target.numpy
        np.testing.assert_array_equal(result.astype(np.longdouble), array.astype(np.longdouble))


@example("UINT64", [0, 2**63 + 1])  # numpy alone makes these float64
@given(st.sampled_from(INTEGERS), st.lists(st.integers(-(2**65), 2**65), min_size=1))
def test_whole_numbers_arrive_exactly_or_not_at_all(wire: str, numbers: list[int]) -> None:
    bounds = np.iinfo(np.dtype(BY_WIRE[wire].numpy))
    if all(bounds.min <= n <= bounds.max for n in numbers):
        assert converted(numbers, BY_WIRE[wire], WHERE).tolist() == numbers
    else:
        with pytest.raises(InvalidRequest, match=f"takes {wire}, expected numbers that fit|do not fit {wire}"):
            converted(numbers, BY_WIRE[wire], WHERE)


@given(st.sampled_from(INTEGERS), st.floats(width=64))
def test_a_float_for_an_integer_must_be_one(wire: str, number: float) -> None:
    bounds = np.iinfo(np.dtype(BY_WIRE[wire].numpy))
    if number.is_integer() and bounds.min <= number <= bounds.max:
        assert converted([number], BY_WIRE[wire], WHERE).tolist() == [int(number)]
    else:
        with pytest.raises(InvalidRequest, match=f"1 of 1 values do not fit {wire}"):
            converted([number], BY_WIRE[wire], WHERE)


@given(hnp.arrays(np.float64, 4, elements=st.floats(-70000, 70000)))
def test_fp16_rounds_but_never_overflows(values: np.ndarray[Any, Any]) -> None:
    # 65520 is half-way between the largest fp16 value and the first that does not exist.
    if (np.abs(values) < 65520).all():
        np.testing.assert_array_equal(converted(values, BY_WIRE["FP16"], WHERE), values.astype(np.float16), strict=True)
    else:
        with pytest.raises(InvalidRequest, match=r"do not fit FP16 \(largest 65504\)"):
            converted(values, BY_WIRE["FP16"], WHERE)


@given(hnp.arrays(np.float32, 8, elements=st.floats(width=32)))
def test_bf16_bits_are_those_of_ml_dtypes(values: np.ndarray[Any, Any]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    if np.array_equal(np.isfinite(values), np.isfinite(expected.astype(np.float32))):
        given_back = converted(values, BY_WIRE["BF16"], WHERE).view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(given_back.astype(np.float32), expected.astype(np.float32))
    else:
        with pytest.raises(InvalidRequest, match=r"do not fit BF16"):
            converted(values, BY_WIRE["BF16"], WHERE)


def test_bf16_is_taken_from_ml_dtypes_and_as_bits() -> None:
    array = np.array([1.0, -2.0], ml_dtypes.bfloat16)
    for given_array in (array, array.view(np.uint16)):
        np.testing.assert_array_equal(as_input(given_array, BY_WIRE["BF16"], WHERE), array.view(np.uint16), strict=True)
    with pytest.raises(InvalidRequest, match=r"takes BF16: give an array of ml_dtypes.bfloat16 or of uint16"):
        as_input(np.zeros(2, np.float32), BY_WIRE["BF16"], WHERE)


def test_nan_and_infinity_are_preserved() -> None:
    result = converted([float("nan"), float("inf"), -float("inf")], BY_WIRE["FP16"], WHERE)
    np.testing.assert_array_equal(result, np.array([np.nan, np.inf, -np.inf], np.float16), strict=True)


def test_big_endian_arrays_are_the_same_dtype() -> None:
    assert as_input(np.array([1.5], ">f2"), BY_WIRE["FP16"], WHERE).tolist() == [1.5]


@pytest.mark.parametrize(
    "value",
    [["a", b"b"], np.array(["a", "b"]), np.array([b"a", b"b"]), np.array(["a", "b"], np.dtypes.StringDType())],
    ids=["list", "U", "S", "StringDType"],
)
def test_strings_for_bytes(value: Any) -> None:
    array = as_input(value, BY_WIRE["BYTES"], WHERE)
    assert array.dtype == object
    assert len(array) == 2


@pytest.mark.parametrize(
    ("value", "wire", "text"),
    [
        ([[1], [1, 2]], "FP32", "cannot be read as an array: its rows differ in length"),
        ([["a"], ["b", "c"]], "BYTES", "cannot be read as an array: its rows differ in length"),
        (["a"], "FP32", "takes FP32, expected numbers that fit it, not <U1"),
        ([None], "FP32", "takes FP32, expected numbers that fit it, not object"),
        ({"a": 1}, "FP32", "takes FP32, expected an array or list of numbers, not dict"),
        ([1, "a"], "BYTES", "takes BYTES, expected strings or bytes, not int 1"),
        (["a", None], "BYTES", "takes BYTES, expected strings or bytes, not NoneType None"),
        (np.array([None, 1], object), "BYTES", "takes BYTES, expected strings or bytes, not NoneType None"),
        (["a", "\ud800"], "BYTES", r"takes BYTES, expected text that UTF-8 can encode, not str '\\ud800'"),
        (np.zeros(2), "BYTES", "takes BYTES .* but the array is float64"),
        (np.array([2**53 + 1]), "FP64", "takes FP64, but the array is int64"),
        ([2], "BOOL", r"do not fit BOOL \(true or false\)"),
        ([0.5], "BOOL", r"do not fit BOOL"),
        (np.array(["2026-01-01"], "M8[D]"), "INT64", r"takes INT64, but the array is datetime64"),
    ],
)
def test_values_that_are_no_tensor_are_refused(value: Any, wire: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        as_input(value, BY_WIRE[wire], WHERE)


@pytest.mark.parametrize("wire", ["FP32", "INT64", "BF16", "BOOL", "BYTES"])
@pytest.mark.parametrize("make", [as_input, converted], ids=["as_input", "converted"])
def test_masked_values_are_none(make: Any, wire: str) -> None:
    value = np.ma.masked_array([b"1", b"2"] if wire == "BYTES" else [1.0, 2.0], mask=[False, True])
    with pytest.raises(InvalidRequest, match="x cannot be read as an array: 1 of its values are masked; fill them"):
        make(value, BY_WIRE[wire], "x")


def test_a_masked_array_without_masked_values() -> None:
    value = np.ma.masked_array(np.array([1.0, 2.0], np.float32), mask=[False, False])
    assert as_input(value, BY_WIRE["FP32"], "x").tolist() == [1, 2]


def test_numbers_are_never_taken_for_strings() -> None:
    with pytest.raises(InvalidRequest, match="x takes BYTES, expected strings or bytes, not float 1.0"):
        converted(torch.ones(2, requires_grad=True), BY_WIRE["BYTES"], "x")


def test_an_unknown_datatype_is_an_error() -> None:
    with pytest.raises(ClientError, match="the server named the datatype 'FP8', expected one of BOOL"):
        datatype_named("FP8")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64, torch.bool])
def test_tensors_share_their_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros((2, 3), dtype=dtype)
    array = as_numpy(tensor)
    tensor[1, 2] = 1
    assert array[1, 2] == 1
    assert array.shape == (2, 3)


def test_bfloat16_tensors_keep_their_bits() -> None:
    tensor = torch.tensor([[1.0, -2.5], [3e38, float("inf")]], dtype=torch.bfloat16).T
    array = as_numpy(tensor)
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())
    np.testing.assert_array_equal(as_input(tensor, BY_WIRE["BF16"], "x").view(ml_dtypes.bfloat16), array)


def test_tensors_that_numpy_cannot_read_are_refused() -> None:
    weights = torch.ones(2, requires_grad=True)
    np.testing.assert_array_equal(as_numpy(weights), [1, 1])
    np.testing.assert_array_equal(as_numpy(torch.tensor([1j]).conj().imag), [-1])
    with pytest.raises(InvalidRequest, match="input 'x' cannot be read as an array: "):
        as_input(torch.ones(2).to_sparse(), BY_WIRE["FP32"], "input 'x'")


def test_a_library_that_speaks_dlpack_only() -> None:
    class Foreign:
        def __init__(self, array: Any) -> None:
            self._array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    array = np.arange(3, dtype=np.float16)
    assert np.shares_memory(as_numpy(Foreign(array)), array)


def test_the_client_does_not_import_torch() -> None:
    program = "import sys, halfserve.serve.client.cli; assert not {'torch', 'onnxruntime', 'onnx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_reads_values_indices_and_labels() -> None:
    output = np.array([[b"0.5:3:a:b", b"-inf:1:"], [b"1e-3:0", "2:9:é".encode()]], object)
    assert classes_of(output) == [
        [Class(3, 0.5, "a:b"), Class(1, float("-inf"), "")],
        [Class(0, 0.001, ""), Class(9, 2.0, "é")],
    ]
    assert classes_of(output[0]) == [[Class(3, 0.5, "a:b"), Class(1, float("-inf"), "")]]
    assert classes_of(np.empty((0, 2), object)) == []


@pytest.mark.parametrize("element", [b"cat", b"1:b:c", 0.5])
def test_other_outputs_are_refused(element: object) -> None:
    with pytest.raises(ClientError, match=r"is no class, expected VALUE:INDEX\[:LABEL\]; was .* top_k"):
        classes_of(np.array([[element]], object))


def test_the_classes_that_the_server_names(server: RunningServer, connect: Connect) -> None:
    client, x = connect(server.address), np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)
    numbers, named = client.infer("mlp", {"x": x})["y"], client.infer("mlp", {"x": x}, top_k={"y": 2})["y"]
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for row, classes in zip(numbers, classes_of(named), strict=True):
        assert [one.index for one in classes] == list(np.argsort(-row.astype(np.float32), kind="stable")[:2])
        assert [one.label for one in classes] == [digits[one.index] for one in classes]
