"""The order of calls, driven by hand: no server, no event loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.client import exchanges
from serve.client.errors import InferenceClientError, InvalidRequest, ModelNotFound, ServerUnavailable


def metadata(datatype: str) -> pb.ModelMetadataResponse:
    tensor = pb.ModelMetadataResponse.TensorMetadata(name="x", datatype=datatype, shape=[-1])
    return pb.ModelMetadataResponse(name="m", inputs=[tensor])


def drive(exchange: exchanges.Exchange[Any], answers: list[Any]) -> tuple[list[str], Any]:
    """Answer each call in turn; an exception among the answers is thrown. Returns the methods called and the result."""
    called = []
    try:
        call = next(exchange)
        while True:
            called.append(call.method)
            answer = answers.pop(0)
            call = exchange.throw(answer) if isinstance(answer, Exception) else exchange.send(answer)
    except StopIteration as finished:
        assert not answers
        return called, finished.value


def infer(cache: exchanges.MetadataCache, value: Any) -> exchanges.Exchange[Any]:
    return exchanges.infer(cache, "m", {"x": value}, version="", outputs=None, request_id="", parameters=None)


def test_the_second_inference_needs_one_call() -> None:
    cache: exchanges.MetadataCache = {}
    assert drive(infer(cache, [1]), [metadata("FP32"), pb.ModelInferResponse()])[0] == ["ModelMetadata", "ModelInfer"]
    assert drive(infer(cache, [1]), [pb.ModelInferResponse()])[0] == ["ModelInfer"]


def test_old_metadata_does_not_refuse_what_a_new_model_takes() -> None:
    cache = {("m", ""): metadata("FP32")}
    called, _ = drive(infer(cache, np.array([1.0])), [metadata("FP64"), pb.ModelInferResponse()])
    assert called == ["ModelMetadata", "ModelInfer"]
    assert cache["m", ""].inputs[0].datatype == "FP64"


def test_fresh_metadata_has_the_last_word() -> None:
    exchange = infer({}, np.array([1.0]))
    next(exchange)
    with pytest.raises(InvalidRequest, match="takes FP32, but the array is float64"):
        exchange.send(metadata("FP32"))


@pytest.mark.parametrize("refusal", [InvalidRequest("wrong shape"), ModelNotFound("unloaded")])
def test_metadata_is_forgotten_when_the_server_refuses(refusal: InferenceClientError) -> None:
    cache = {("m", ""): metadata("FP32")}
    with pytest.raises(type(refusal), match=str(refusal)):
        drive(infer(cache, [1]), [refusal])
    assert cache == {}


def test_metadata_outlives_an_unreachable_server() -> None:
    cache = {("m", ""): metadata("FP32")}
    with pytest.raises(ServerUnavailable, match="gone"):
        drive(infer(cache, [1]), [ServerUnavailable("gone")])
    assert ("m", "") in cache


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(pb.ModelReadyResponse(ready=True), True), (pb.ModelReadyResponse(), False), (ModelNotFound("no"), False)],
)
def test_readiness_is_an_answer_not_an_error(answer: Any, expected: bool) -> None:
    assert drive(exchanges.ready("m", ""), [answer]) == (["ModelReady"], expected)


def test_other_errors_are_not_taken_for_unreadiness() -> None:
    with pytest.raises(InferenceClientError, match="broken"):
        drive(exchanges.ready(None, ""), [InferenceClientError("broken", code="INTERNAL")])
