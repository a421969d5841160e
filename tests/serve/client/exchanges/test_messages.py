from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.client.errors import InferenceClientError, InvalidRequest
from serve.client.exchanges import messages
from serve.client.exchanges.messages import infer_request, output_arrays


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


def test_arrays_need_not_lie_in_one_piece(metadata: pb.ModelMetadataResponse) -> None:
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
    ("options", "text"),
    [
        ({"outputs": ["z"]}, "model 'm' has no output 'z'; its outputs are: y"),
        ({"top_k": {"z": 1}}, "has no output 'z'"),
        ({"top_k": 0}, "top_k of output 'y' must be a whole number above 0, not 0"),
        ({"outputs": [], "top_k": {"y": 1}}, "output 'y' stands in top_k or into, but not in outputs: "),
    ],
)
def test_outputs_that_cannot_be_asked_for(metadata: pb.ModelMetadataResponse, options: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        infer_request(metadata, {}, **options)


def test_another_shape_is_not_sent(metadata: pb.ModelMetadataResponse) -> None:
    with pytest.raises(InvalidRequest, match=r"has the shape \[2\], expected \[-1, 2\] \(-1: any size\); only the batch"):
        infer_request(metadata, {"x": [1, 2]})


def test_bf16_arrives_as_what_it_is() -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    outputs = output_arrays(response(bits.tobytes(), datatype="BF16"))
    assert outputs["y"].dtype == ml_dtypes.bfloat16
    assert outputs["y"].tolist() == [1.0, -2.0]


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
