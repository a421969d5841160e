"""Requests from arrays and parameters, arrays from answers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client import infer_messages
from halfserve.serve.client.errors import ClientError, InvalidRequest
from halfserve.serve.client.infer_messages import add_parameters, infer_request, output_arrays


def request(parameters: Any = None, *, priority: Any = 0, queue_timeout_s: Any = None) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest()
    add_parameters(made, parameters, priority=priority, queue_timeout_s=queue_timeout_s)
    return made


@pytest.mark.parametrize(
    ("value", "field", "sent"),
    [
        (True, "bool_param", True),
        (np.bool_(0), "bool_param", False),
        (-3, "int64_param", -3),
        (2**63 - 1, "int64_param", 2**63 - 1),
        (2**63, "uint64_param", 2**63),
        (np.int32(4), "int64_param", 4),
        (0.5, "double_param", 0.5),
        ("a", "string_param", "a"),
    ],
)
def test_values_take_the_field_of_their_type(value: Any, field: str, sent: Any) -> None:
    parameter = request({"p": value}).parameters["p"]
    assert parameter.WhichOneof("parameter_choice") == field
    assert getattr(parameter, field) == sent


def test_priority_and_queue_timeout_are_the_protocols() -> None:
    made = request(priority=2, queue_timeout_s=0.25)
    assert made.parameters["priority"].int64_param == 2
    assert made.parameters["timeout"].int64_param == 250_000
    assert request(queue_timeout_s=1e-9).parameters["timeout"].int64_param == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"priority": -1}, "priority must be a whole number, 1 for the most urgent, not -1"),
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"queue_timeout_s": "3"}, "queue_timeout_s must be seconds above 0, or None, not '3'"),
        ({"parameters": {"p": 2**64}}, "parameter 'p' must fit 64 bits"),
        ({"parameters": {"p": None}}, "parameter 'p' must be a bool, int, float or str"),
        ({"parameters": {1: 2}}, "a parameter's name must be text, not 1"),
        ({"parameters": {"\ud800": 2}}, "a parameter's name must be text that UTF-8 can encode"),
        ({"parameters": {"a": "\ud800"}}, "parameter 'a' must be text that UTF-8 can encode, not .*: surrogates not allowed"),
        ({"queue_timeout_s": 0}, "queue_timeout_s must be seconds above 0, or None, not 0"),
        ({"queue_timeout_s": float("nan")}, "queue_timeout_s must be seconds above 0"),
    ],
)
def test_invalid_parameters_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        request(**options)


@pytest.fixture
def metadata() -> pb.ModelMetadataResponse:
    tensors = [
        pb.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP16", shape=[-1, 2]),
        pb.ModelMetadataResponse.TensorMetadata(name="t", datatype="BYTES", shape=[-1]),
    ]
    output = pb.ModelMetadataResponse.TensorMetadata(name="y", datatype="FP16", shape=[-1, 2])
    return pb.ModelMetadataResponse(name="m", inputs=tensors, outputs=[output])


def response(raw: bytes, **tensor: Any) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse(raw_output_contents=[raw])
    made.outputs.add(**{"name": "y", "datatype": "FP16", "shape": [2], **tensor})
    return made


def test_a_request_in_full(metadata: pb.ModelMetadataResponse) -> None:
    x = np.array([[1, 2]], np.float16)
    request = infer_request(metadata, {"t": ["ab"], "x": x}, version="3", outputs=["y"], request_id="id")
    assert (request.model_name, request.model_version, request.id) == ("m", "3", "id")
    assert [(t.name, t.datatype, list(t.shape)) for t in request.inputs] == [("t", "BYTES", [1]), ("x", "FP16", [1, 2])]
    assert list(request.raw_input_contents) == [b"\x02\0\0\0ab", x.tobytes()]
    assert [output.name for output in request.outputs] == ["y"]


def test_arrays_need_not_be_contiguous(metadata: pb.ModelMetadataResponse) -> None:
    x = np.arange(4, dtype=np.float16).reshape(2, 2).T
    assert infer_request(metadata, {"x": x}).raw_input_contents[0] == np.array([0, 2, 1, 3], np.float16).tobytes()


def test_outputs_with_classes(metadata: pb.ModelMetadataResponse) -> None:
    for top_k in (3, {"y": 3}):
        (output,) = infer_request(metadata, {}, top_k=top_k).outputs
        assert output.parameters["classification"].int64_param == 3


def test_float32_is_cast_when_asked(metadata: pb.ModelMetadataResponse) -> None:
    x = np.array([[1, 2.0001]], np.float32)
    assert infer_request(metadata, {"x": x}, cast=True).raw_input_contents[0] == x.astype(np.float16).tobytes()
    with pytest.raises(
        InvalidRequest, match=r"1 of 2 values do not fit FP16 \(largest 65504\); the first is 70000.0 at \[0, 1\]"
    ):
        infer_request(metadata, {"x": np.array([[1, 70000]], np.float32)}, cast=True)
    with pytest.raises(InvalidRequest, match=r"takes FP16, but the array is float32; convert it .* or cast=True"):
        infer_request(metadata, {"x": x})


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ({}, {"outputs": ["z"]}, "model 'm' has no output 'z'; its outputs are: y"),
        ({}, {"top_k": {"z": 1}}, "has no output 'z'"),
        ({}, {"top_k": 0}, "top_k of output 'y' must be a whole number above 0, not 0"),
        ({}, {"outputs": [], "top_k": {"y": 1}}, "output 'y' stands in top_k or into, but not in outputs: "),
        ({"x": [1, 2]}, {}, r"has the shape \[2\], expected \[-1, 2\] \(-1: any size\); only the batch"),
        ({"z": [1]}, {}, "model 'm' has no input 'z'; its inputs are: x, t"),
    ],
)
def test_requests_that_do_not_fit_the_model_are_refused(
    metadata: pb.ModelMetadataResponse, inputs: Any, options: Any, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        infer_request(metadata, inputs, **options)


def test_bf16_arrives_as_bfloat16() -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    outputs = output_arrays(response(bits.tobytes(), datatype="BF16"))
    assert outputs["y"].dtype == ml_dtypes.bfloat16
    assert outputs["y"].tolist() == [1.0, -2.0]


def test_inputs_larger_than_a_message_are_refused(metadata: pb.ModelMetadataResponse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_messages, "MAX_MESSAGE_BYTES", 7)
    with pytest.raises(InvalidRequest, match="the inputs have 8 bytes, expected at most 7 in one message; split them"):
        infer_request(metadata, {"x": np.zeros((2, 2), np.float16)})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (response(b"abc"), "output 'y' of the server's answer has 3 bytes, expected 4"),
        (response(b"ab", datatype="FP8"), "the server named the datatype 'FP8'"),
        (response(b"\x09\0\0\0", datatype="BYTES", shape=[1]), "output 'y' .* ends inside BYTES element 0"),
        (pb.ModelInferResponse(raw_output_contents=[b""]), "answered 0 outputs with 1 raw contents"),
    ],
)
def test_a_contradictory_response_is_refused(answer: pb.ModelInferResponse, text: str) -> None:
    with pytest.raises(ClientError, match=text) as contradiction:
        output_arrays(answer)
    assert contradiction.value.code == "INTERNAL"
