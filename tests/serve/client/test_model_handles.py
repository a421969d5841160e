"""`client.model(...)` of both clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halfserve import InvalidRequest, ModelNotFound
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.model_handles import ModelDescription, TensorInfo
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import Failure, ScriptedServer
from tests.serve.running_server import RunningServer

HALF = np.dtype(np.float16)


def described(**inputs: tuple[int, ...]) -> ModelDescription:
    return ModelDescription(
        name="m",
        version="",
        versions=("1",),
        max_batch_size=4,
        inputs={
            name: TensorInfo(name=name, datatype="FP16", dtype=HALF, shape=shape, optional=name == "mask")
            for name, shape in inputs.items()
        },
        outputs={},
    )


def test_knows_the_model(server: RunningServer, connect: Connect) -> None:
    mlp = connect(server.address).model("mlp", "3")
    assert (mlp.name, mlp.version, mlp.max_batch_size) == ("mlp", "3", 16)
    assert mlp.inputs["x"] == TensorInfo(name="x", datatype="FP16", dtype=HALF, shape=(-1, 64))
    assert mlp.outputs["y"].shape == (-1, 10)
    assert mlp.description.versions == ("1", "3")
    assert mlp.is_ready()
    assert "x FP16[-1, 64] -> y FP16[-1, 10]" in repr(mlp)


def test_asks_with_a_mapping_or_the_only_array(server: RunningServer, connect: Connect) -> None:
    client, x = connect(server.address), np.ones((2, 64), np.float16)
    mlp = client.model("mlp")
    expected = client.infer("mlp", {"x": x})["y"]
    for inputs in (x, {"x": x}, x.tolist()):
        np.testing.assert_array_equal(mlp.infer(inputs)["y"], expected)
    assert mlp.infer(x, top_k=3, outputs=["y"], timeout_s=5)["y"].shape == (2, 3)
    assert [answer.outputs["y"].shape for answer in mlp.stream_infer([{"x": x}], in_flight=1)] == [(2, 10)]


def test_an_unknown_model(server: RunningServer, connect: Connect) -> None:
    with pytest.raises(ModelNotFound, match="nope"):
        connect(server.address).model("nope")


def test_invalid_requests_are_not_sent(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelConfig"] = [pb.ModelConfigResponse()]
    model = connect(scripted.address).model("m")
    with pytest.raises(
        InvalidRequest, match=r"has the shape \[2\], expected \[-1, 2\] .*; only the batch dimension is missing"
    ):
        model.infer(np.zeros(2, np.float32))
    with pytest.raises(InvalidRequest, match="the request to model 'm' lacks the input 'x'; its inputs are: x"):
        model.infer({})
    assert scripted.count("ModelInfer") == 0


def test_a_replaced_model_is_described_again(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelConfig"] = [pb.ModelConfigResponse()]
    model = connect(scripted.address).model("m")
    wider = pb.ModelMetadataResponse(name="m", versions=["2"])
    wider.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
    scripted.answers["ModelMetadata"] = [wider]
    scripted.answers["ModelInfer"] = [Failure("INTERNAL", "it was asked")]
    with pytest.raises(Exception, match="it was asked"):
        model.infer(np.zeros((1, 3), np.float32))
    assert model.inputs["x"].shape == (-1, 3)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"a": np.zeros((1, 2)), "b": np.zeros((2, 2))}, "different numbers of rows: 1 in 'a' and 2 in 'b'; expected one"),
        ({"a": np.zeros((5, 2)), "b": np.zeros((5, 2))}, "'a' of model 'm' has 5 rows, expected 1 to 4 in one request; split"),
        ({"a": np.zeros((0, 2)), "b": np.zeros((0, 2))}, "has 0 rows, expected 1 to 4"),
        ({"a": np.zeros((1, 2)), "b": np.zeros((1, 2)), "c": 1}, "model 'm' has no input 'c'; its inputs are: a, b, mask"),
        ({"b": np.zeros((1, 2))}, "lacks the input 'a'"),
    ],
    ids=["rows", "many", "none", "unknown", "missing"],
)
def test_requests_that_do_not_fit(inputs: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        described(a=(-1, 2), b=(-1, 2), mask=(-1, 2)).check(inputs)


def test_optional_inputs_may_be_left_out() -> None:
    described(a=(-1, 2), mask=(-1, 2)).check({"a": np.zeros((4, 2))})


def test_several_inputs_need_names() -> None:
    with pytest.raises(InvalidRequest, match="has 2 inputs, expected a mapping with a, b, not one list"):
        described(a=(-1,), b=(-1,)).named([1])
