from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import InvalidArgumentError, UnsupportedError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.tensors import LateInputs, TensorSpec
from halfserve.serve.protocol.codec import decode_inputs, raw_layout, requested_names, special_outputs
from halfserve.serve.protocol.shared_memory import SharedMemory
from tests.serve.engine.fakes import HeldBackend

OFF = SharedMemory(enabled=False)


def spec(name: str, wire: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, datatype=BY_WIRE[wire], shape=shape)


def model(*inputs: TensorSpec, max_batch_size: int = 4) -> Model:
    outputs = (spec("y", "FP16", -1, 2), spec("z", "BYTES", -1, 1))
    return Model(
        name="m",
        version=2,
        interface=ModelInterface(inputs=inputs, outputs=outputs, batched=bool(max_batch_size)),
        config=ModelConfig(max_batch_size=max_batch_size),
        backends=[HeldBackend()],
        limits=BatchLimits(max_rows=max(1, max_batch_size)),
    )


TWO = model(spec("a", "FP16", -1, 2), spec("b", "INT32", -1, -1))


def request(*inputs: tuple[str, str, list[int], bytes], **fields: Any) -> ModelInferRequest:
    message = ModelInferRequest(model_name="m", id="42", **fields)
    for name, wire, shape, raw in inputs:
        message.inputs.add(name=name, datatype=wire, shape=shape)
        message.raw_input_contents.append(raw)
    return message


A, B = ("a", "FP16", [1, 2], bytes(4)), ("b", "INT32", [1, 3], bytes(12))


def test_a_good_request_is_viewed() -> None:
    decoded = decode_inputs(request(B, A), TWO, OFF)
    assert {n: (x.dtype.str, x.shape) for n, x in decoded.inputs.items()} == {"a": ("<f2", (1, 2)), "b": ("<i4", (1, 3))}
    assert decoded.rows == 1


def test_the_order_of_inputs_does_not_change_the_bucket_and_the_shape_does() -> None:
    wide = ("b", "INT32", [1, 4], bytes(16))
    assert decode_inputs(request(A, B), TWO, OFF).bucket == decode_inputs(request(B, A), TWO, OFF).bucket
    assert decode_inputs(request(A, B), TWO, OFF).bucket != decode_inputs(request(A, wide), TWO, OFF).bucket


def test_of_a_single_input_the_rows_do_not_change_the_bucket_and_the_shape_does() -> None:
    one = model(spec("b", "INT32", -1, -1))
    buckets = [
        decode_inputs(request(("b", "INT32", [rows, width], bytes(4 * rows * width))), one, OFF).bucket
        for rows, width in ((1, 3), (2, 3), (1, 4))
    ]
    assert buckets[0] == buckets[1] != buckets[2]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([A], "missing input 'b'; the model takes 'a', 'b'"),
        ([A, B, A], "input 'a' is given twice"),
        ([A, ("q", "INT32", [1, 3], bytes(12))], "input 'q' is not one of the model's: 'a', 'b'"),
        ([A, ("b", "INT64", [1, 3], bytes(24))], "input 'b' has datatype 'INT64', expected 'INT32'"),
        ([("a", "FP16", [1, 3], bytes(6)), B], r"input 'a' has shape \[1, 3\], expected \[-1, 2\]"),
        ([("a", "FP16", [2], bytes(4)), B], r"input 'a' has shape \[2\], expected 2 dimensions: \[-1, 2\]"),
        ([A, ("b", "INT32", [1, -3], b"")], r"input 'b' has shape \[1, -3\]"),
        ([("a", "FP16", [1, 2], bytes(5)), B], r"input 'a' has 5 bytes, expected 4 for FP16 of shape \[1, 2\]"),
        ([("a", "FP16", [2, 2], bytes(8)), B], "inputs have different batch sizes {'a': 2, 'b': 1}"),
        ([("a", "FP16", [5, 2], bytes(20)), ("b", "INT32", [5, 0], b"")], "the batch size is 5, expected 1 to 4; split"),
        ([("a", "FP16", [0, 2], b""), ("b", "INT32", [0, 1], b"")], "the batch size is 0, expected 1 to 4"),
    ],
)
def test_a_wrong_request_is_told_what_and_what_was_expected(
    inputs: list[tuple[str, str, list[int], bytes]], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        decode_inputs(request(*inputs), TWO, OFF)


def test_raw_entries_must_match_the_inputs() -> None:
    message = request(A, B)
    message.raw_input_contents.append(b"")
    with pytest.raises(InvalidArgumentError, match="raw_input_contents has 3 entries, expected 2"):
        decode_inputs(message, TWO, OFF)


def test_contents_beside_raw_are_refused() -> None:
    message = request(A, B)
    message.inputs[1].contents.int_contents.extend([1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="input 'b' has contents and a raw_input_contents entry"):
        decode_inputs(message, TWO, OFF)


def test_contents_beside_a_place_in_shared_memory_are_refused() -> None:
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="x", datatype="INT32", shape=[1, 1])
    tensor.contents.int_contents.append(1)
    tensor.parameters["shared_memory_region"].string_param = "region"
    tensor.parameters["shared_memory_byte_size"].int64_param = 4
    with pytest.raises(InvalidArgumentError, match="input 'x' has contents and a place in shared memory, expected one of them"):
        decode_inputs(message, model(spec("x", "INT32", -1, -1)), OFF)


def test_shared_memory_that_is_off_is_declined() -> None:
    message = request(A, B)
    del message.raw_input_contents[0]
    message.inputs[0].parameters["shared_memory_region"].string_param = "region"
    message.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4
    with pytest.raises(UnsupportedError, match="shared memory is off on this server; start it with --shared-memory"):
        decode_inputs(message, TWO, OFF)


def typed(wire: str, field: str, values: list[Any], shape: list[int]) -> np.ndarray[Any, Any]:
    message = ModelInferRequest()
    tensor = message.inputs.add(name="x", datatype=wire, shape=shape)
    getattr(tensor.contents, field).extend(values)
    return decode_inputs(message, model(spec("x", wire, -1, -1)), OFF).inputs["x"]


@pytest.mark.parametrize(
    ("wire", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [1.5, -0.25]),
        ("FP64", "fp64_contents", [1e300, -1e-300]),
        ("BYTES", "bytes_contents", [b"", b"\x00\xff"]),
    ],
)
def test_typed_contents_are_taken_for_every_type_that_has_them(wire: str, field: str, values: list[Any]) -> None:
    array = typed(wire, field, values, [1, 2])
    assert (array.dtype, array.tolist()) == (BY_WIRE[wire].numpy, [values])


@pytest.mark.parametrize(("wire", "field", "tag"), [("FP32", "fp32_contents", 0x35), ("FP64", "fp64_contents", 0x39)])
def test_typed_contents_are_the_numbers_however_they_are_written(wire: str, field: str, tag: int) -> None:
    dtype = BY_WIRE[wire].array_dtype
    numbers = np.array([[1.5, np.inf, -0.0], [np.nan, 1e-40, 3]], dtype)
    message = ModelInferRequest()
    message.inputs.add(name="x", datatype=wire, shape=[2, 3])
    unknown = b"\xfa\x01\x03abc"  # a field of another version, before, between and after
    one_by_one = [bytes((tag,)) + number.tobytes() for number in numbers.ravel()]
    message.inputs[0].contents.MergeFromString(unknown.join([b"", *one_by_one, b""]))
    array = decode_inputs(message, model(spec("x", wire, -1, -1)), OFF).inputs["x"]
    assert (array.dtype, array.shape, array.tobytes()) == (dtype, (2, 3), numbers.tobytes())
    assert typed(wire, field, [], [1, 0]).shape == (1, 0)


def test_typed_truth_values_are_not_looked_at_one_by_one() -> None:
    count = 100_000
    message = ModelInferRequest()
    message.inputs.add(name="x", datatype="BOOL", shape=[1, count + 2])
    written = b"\x0a\xa0\x8d\x06" + b"\x02\x00" * (count // 2)  # together, and each true one as another number than 1
    message.inputs[0].contents.MergeFromString(b"\x08\x00" + written + b"\xfa\x01\x01a" + b"\x08\x80\x01")
    truth = model(spec("x", "BOOL", -1, -1))
    tracemalloc.start()
    try:
        array = decode_inputs(message, truth, OFF).inputs["x"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (array.dtype, array.tolist()) == (np.bool_, [[False, *[True, False] * (count // 2), True]])
    assert peak < 4 * count  # a list of them takes eight bytes for each


@pytest.mark.parametrize(
    ("wire", "field", "values", "message"),
    [
        ("FP16", "fp32_contents", [1.0], "FP16 has no typed contents, expected its bytes in raw_input_contents"),
        ("INT8", "int_contents", [300], "an element in int_contents outside the range of INT8"),
        ("UINT16", "uint_contents", [70000], "outside the range of UINT16"),
        ("INT32", "int_contents", [1, 2], r"has 2 elements in int_contents, expected 1 for shape \[1, 1\]"),
        ("INT64", "int_contents", [1], "has its elements in int_contents, expected int64_contents"),
    ],
)
def test_wrong_typed_contents_are_refused(wire: str, field: str, values: list[Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        typed(wire, field, values, [1, 1])


MANY = 10_000
PREFIXED = b"".join(bytes([size, 0, 0, 0]) + b"e" * size for size in (number % 7 for number in range(MANY)))


@pytest.mark.parametrize(
    ("wire", "given", "expected"),
    [
        ("BYTES", PREFIXED, [b"e" * (number % 7) for number in range(MANY)]),
        ("BYTES", {"bytes_contents": [b"%d" % number for number in range(MANY)]}, [b"%d" % number for number in range(MANY)]),
        ("INT64", {"int64_contents": range(-5, MANY - 5)}, list(range(-5, MANY - 5))),
    ],
)
def test_many_elements_that_are_read_one_by_one_are_read_by_who_asks(wire: str, given: Any, expected: list[Any]) -> None:
    message = ModelInferRequest()
    tensor = message.inputs.add(name="x", datatype=wire, shape=[1, MANY // 2, 2])
    if isinstance(given, bytes):
        message.raw_input_contents.append(given)
    else:
        (field,) = given
        getattr(tensor.contents, field).extend(given[field])
    whole = TensorSpec(name="x", datatype=BY_WIRE[wire], shape=(-1, MANY // 2, 2), model_shape=(-1, 2, MANY // 2))
    decoded = decode_inputs(message, model(whole), OFF)
    assert isinstance(decoded.inputs, LateInputs)
    assert (decoded.rows, decoded.bucket, list(decoded.inputs)) == (1, (2, MANY // 2), ["x"])
    array = decoded.inputs["x"]
    assert (array.dtype, array.shape) == (BY_WIRE[wire].numpy, (1, 2, MANY // 2))
    assert array.ravel().tolist() == expected


@pytest.mark.parametrize(
    ("wire", "given", "message"),
    [
        ("BYTES", PREFIXED[:-1], f"input 'x' ends inside BYTES element {MANY - 1}, expected a 4-byte length and as many bytes"),
        ("BYTES", PREFIXED + bytes(4), f"input 'x' has more than {MANY} BYTES elements, expected {MANY}"),
        ("INT8", [*[1] * (MANY - 1), 300], "input 'x' has an element in int_contents outside the range of INT8"),
    ],
)
def test_many_wrong_elements_get_the_same_words_when_they_are_read(wire: str, given: Any, message: str) -> None:
    request = ModelInferRequest()
    tensor = request.inputs.add(name="x", datatype=wire, shape=[1, MANY])
    if isinstance(given, bytes):
        request.raw_input_contents.append(given)
    else:
        tensor.contents.int_contents.extend(given)
    decoded = decode_inputs(request, model(spec("x", wire, -1, -1)), OFF)
    with pytest.raises(InvalidArgumentError, match=message):
        decoded.inputs["x"]


def test_a_huge_shape_is_a_clear_error() -> None:
    with pytest.raises(InvalidArgumentError, match="expected 1152921504606846976"):
        typed("INT32", "int_contents", [1], [1, 2**60])


def test_a_form_is_learned_where_the_bytes_speak_for_themselves() -> None:
    layout = raw_layout(request(B, A), TWO)
    assert layout is not None
    assert [(f.name, f.dtype.str, f.shape, f.elements, f.size) for f in layout.inputs] == [
        ("b", "<i4", (1, 3), 3, 12),
        ("a", "<f2", (1, 2), 2, 4),
    ]


def test_a_form_is_learned_with_parameters_that_mean_nothing_here() -> None:
    # perf_analyzer sends it with every request.
    final = request(B, A)
    final.parameters["triton_enable_empty_final_response"].bool_param = True
    assert raw_layout(final, TWO) == raw_layout(request(B, A), TWO)


def test_no_form_is_learned_where_each_request_needs_a_look() -> None:
    with_parameter = request(A, B)
    with_parameter.inputs[0].parameters["unknown"].string_param = "meaning"
    assert raw_layout(with_parameter, TWO) is None
    for wire, raw in (("BOOL", b"\1"), ("BYTES", bytes(4))):
        assert raw_layout(request(("x", wire, [1, 1], raw)), model(spec("x", wire, -1, -1))) is None
    assert raw_layout(ModelInferRequest(inputs=request(A).inputs), TWO) is None


@given(st.binary(max_size=200))
def test_no_message_gets_anything_but_a_clear_refusal_or_arrays(data: bytes) -> None:
    try:
        message = ModelInferRequest.FromString(data)
    except Exception:  # noqa: BLE001  (protobuf refuses it before we see it)
        return
    try:
        decode_inputs(message, TWO, OFF)
        requested_names(message, TWO)
        special_outputs(message, TWO, OFF)
    except (InvalidArgumentError, UnsupportedError) as error:
        assert str(error)  # noqa: PT017  (any of the two will do)
