"""Answers that no well-behaved server gives: each ends in an exception of this package, and never in a wrong array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.client import DeadlineExceeded, InferenceClientError
from tests.serve.benchmark.load.scripted_peer import HEADERS, OK, Peer, peer
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import ScriptedServer

WAIT_S = 20
ROW: dict[str, Any] = {"x": [[1.0, 2.0]]}


def response(*values: float, names: tuple[str, ...] = ("y",), datatype: str = "FP32", request_id: str = "") -> Any:
    """An answer of the model "m"; without values its outputs lie in shared memory."""
    made = pb.ModelInferResponse(model_name="m", id=request_id)
    for name in names:
        made.outputs.add(name=name, datatype=datatype, shape=[1, len(values) or 2])
        made.raw_output_contents.append(np.array(values, np.float32).tobytes())
    return made


@pytest.fixture
def model(scripted: ScriptedServer) -> ScriptedServer:
    """A server with a model "m": "x" [-1, 2] and outputs "y" and "z" of that shape."""
    metadata = pb.ModelMetadataResponse(name="m", versions=["1"])
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 2])
    for name in ("y", "z"):
        metadata.outputs.add(name=name, datatype="FP32", shape=[-1, 2])
    scripted.answers["ModelMetadata"] = [metadata]
    scripted.answers["SystemSharedMemoryRegister"] = [pb.SystemSharedMemoryRegisterResponse()]
    scripted.answers["SystemSharedMemoryUnregister"] = [pb.SystemSharedMemoryUnregisterResponse()]
    return scripted


@pytest.mark.parametrize("sent", [None, b"", b"\0\0\0", b"\0\0\0\0\5ab", b"\0\0\0\0\2\xff\xff"])
def test_a_call_that_ends_well_without_a_message(connect: Connect, sent: bytes | None) -> None:
    """None at all, a part of one, or one that is no protobuf."""

    def answer(server: Peer, stream: int) -> None:
        if sent is None:
            server.refuse(stream, *HEADERS, *OK)
            return
        server.http2.send_response(stream, HEADERS)
        if sent:
            server.http2.send_data(stream, sent)
        server.http2.send_trailers(stream, OK)

    with peer(answer) as (host, port):
        client = connect(f"{host}:{port}", timeout_s=WAIT_S)
        for ask in (client.server_metadata, client.is_live, lambda: client.infer("m", {"x": [1.0]})):
            with pytest.raises(InferenceClientError, match=r"no message|deserializing") as caught:
                ask()
            assert caught.value.code == "INTERNAL"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (response(1, 2, request_id="8"), "the answer to the request '8', expected that to '7'"),
        (response(1, 2, names=("z",)), "has 0 outputs 'y', expected one; its outputs are: z"),
        (response(1, 2, names=("y", "y")), "has 2 outputs 'y', expected one"),
    ],
    ids=["foreign", "missing", "twice"],
)
def test_an_answer_that_is_not_to_the_request(model: ScriptedServer, connect: Connect, given: Any, text: str) -> None:
    model.answers["ModelInfer"] = [given]
    streamed = pb.ModelStreamInferResponse(infer_response=given)
    streamed.infer_response.id = "0"
    model.answers["ModelStreamInfer"] = [streamed]
    client = connect(model.address)
    with pytest.raises(InferenceClientError, match=text) as caught:
        client.infer("m", ROW, outputs=["y"], request_id="7")
    assert caught.value.code == "INTERNAL"
    if not given.id:
        (answer,) = client.stream_infer("m", [ROW], outputs=["y"])
        with pytest.raises(InferenceClientError, match=text):
            _ = answer.outputs


def test_a_server_that_does_not_say_the_id_again_or_makes_one_up(model: ScriptedServer, connect: Connect) -> None:
    model.answers["ModelInfer"] = [response(1, 2), response(3, 4, request_id="made up")]
    client = connect(model.address)
    assert client.infer("m", ROW, request_id="7")["y"].tolist() == [[1, 2]]
    assert client.infer("m", ROW)["y"].tolist() == [[3, 4]]


def test_an_output_that_comes_in_the_message_is_put_into_the_array(model: ScriptedServer, connect: Connect) -> None:
    model.answers["ModelInfer"] = [response(3, 4)]
    client = connect(model.address)
    with client.shared_region(4096) as region:
        y = region.array((1, 2), np.float32)
        assert np.shares_memory(client.infer("m", ROW, into={"y": y})["y"], y)
        assert y.tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (response(3, 4, 5), "has 12 bytes, the array for it 8"),
        (response(names=()), "has 0 outputs 'y', expected one"),
        (response(datatype="FP64"), "is FP64, but the array for it has the dtype float32"),
    ],
    ids=["longer", "missing", "dtype"],
)
def test_an_array_that_is_not_filled(model: ScriptedServer, connect: Connect, given: Any, text: str) -> None:
    model.answers["ModelInfer"] = [given]
    client = connect(model.address)
    with client.shared_region(4096) as region, pytest.raises(InferenceClientError, match=text) as caught:
        client.infer("m", ROW, into={"y": region.array((1, 2), np.float32)})
    assert caught.value.code == "INTERNAL"


def test_an_answer_that_is_begun_and_not_ended(connect: Connect) -> None:
    def begin(server: Peer, stream: int) -> None:
        server.http2.send_response(stream, HEADERS)
        server.http2.send_data(stream, b"\0\0\0\0\5ab")

    with peer(begin) as (host, port):
        client = connect(f"{host}:{port}", timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=rf"^{host}:{port} did not answer ServerMetadata within 0.2 s; allow more"):
            client.server_metadata()


def test_a_model_that_the_server_calls_otherwise_is_asked_by_the_name_given(model: ScriptedServer, connect: Connect) -> None:
    model.answers["ModelConfig"] = [pb.ModelConfigResponse()]
    model.answers["ModelInfer"] = [response(1, 2)]
    streamed = pb.ModelStreamInferResponse(infer_response=response(1, 2, request_id="0"))
    model.answers["ModelStreamInfer"] = [streamed]
    client = connect(model.address)
    client.infer("alias", ROW)
    client.model("other").infer(ROW)
    list(client.stream_infer("third", [ROW]))
    asked = [pb.ModelInferRequest.FromString(body).model_name for method, body, _ in model.calls if method.endswith("Infer")]
    assert asked == ["alias", "other", "third"]
