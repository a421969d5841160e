from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.client import messages
from serve.client.errors import InferenceClientError, InvalidRequest
from serve.client.messages import infer_request, output_arrays


@pytest.fixture
def metadata() -> pb.ModelMetadataResponse:
    tensors = [
        pb.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP16", shape=[-1, 2]),
        pb.ModelMetadataResponse.TensorMetadata(name="t", datatype="BYTES", shape=[-1]),
    ]
    return pb.ModelMetadataResponse(name="m", inputs=tensors)


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


def test_arrays_need_not_lie_in_one_piece(metadata: pb.ModelMetadataResponse) -> None:
    x = np.arange(4, dtype=np.float16).reshape(2, 2).T
    assert infer_request(metadata, {"x": x}).raw_input_contents[0] == np.array([0, 2, 1, 3], np.float16).tobytes()


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
def test_parameters_take_the_field_of_their_type(metadata: pb.ModelMetadataResponse, value: Any, field: str, sent: Any) -> None:
    parameter = infer_request(metadata, {}, parameters={"p": value}).parameters["p"]
    assert parameter.WhichOneof("parameter_choice") == field
    assert getattr(parameter, field) == sent


@pytest.mark.parametrize(("value", "text"), [(2**64, "must fit 64 bits"), (None, "must be a bool, int, float or str")])
def test_other_parameters_have_no_place(metadata: pb.ModelMetadataResponse, value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"parameter 'p' {text}"):
        infer_request(metadata, {}, parameters={"p": value})


def test_an_unknown_input_is_named_beside_the_known_ones(metadata: pb.ModelMetadataResponse) -> None:
    with pytest.raises(InvalidRequest, match="model 'm' has no input 'z'; its inputs are: x, t"):
        infer_request(metadata, {"z": [1]})


def test_more_than_a_message_holds(metadata: pb.ModelMetadataResponse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 7)
    with pytest.raises(InvalidRequest, match="the inputs have 8 bytes, expected at most 7 in one message; split them"):
        infer_request(metadata, {"x": np.zeros((2, 2), np.float16)})


def test_outputs_are_the_callers_own() -> None:
    outputs = output_arrays(response(np.array([1, 2], np.float16).tobytes()))
    outputs["y"] += np.float16(1)
    assert outputs["y"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (response(b"abc"), "output 'y' of the server's answer has 3 bytes, expected 4"),
        (response(b"ab", datatype="FP8"), "the server speaks of the datatype 'FP8'"),
        (response(b"\x09\0\0\0", datatype="BYTES", shape=[1]), "output 'y' .* ends inside BYTES element 0"),
        (pb.ModelInferResponse(raw_output_contents=[b""]), "answered 0 outputs with 1 raw contents"),
    ],
)
def test_a_response_that_contradicts_itself(answer: pb.ModelInferResponse, text: str) -> None:
    with pytest.raises(InferenceClientError, match=text) as contradiction:
        output_arrays(answer)
    assert contradiction.value.code == "INTERNAL"
