"""The protocol over the real transport, with grpcio's own client and tritonclient as the peers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.utils import InferenceServerException

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.datatypes import DATATYPES
from halfserve.serve.protocol.service import Service
from halfserve.serve.transports.listening import BindError
from tests.models import mlp_weights
from tests.serve.running_server import MakeTransport, RunningServer

SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as connected:
        yield connected


def tensor(name: str, array: np.ndarray[Any, Any], wire: str) -> triton.InferInput:
    return triton.InferInput(name, array.shape, wire).set_data_from_numpy(array)


def call(channel: grpc.Channel, method: str, request: Any, response: Any, **options: Any) -> Any:
    stub = channel.unary_unary(SERVICE + method, type(request).SerializeToString, response.FromString)
    return stub(request, timeout=options.pop("timeout", 20), **options)


def test_tritonclient_infers_on_every_version(client: triton.InferenceServerClient) -> None:
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float16)
    first, second = (w.astype(np.float32) for w in mlp_weights())
    for version in ("", "1", "3"):
        result = client.infer("mlp", [tensor("x", x, "FP16")], model_version=version, request_id="abc")
        np.testing.assert_allclose(result.as_numpy("y"), np.maximum(x @ first, 0) @ second, atol=4e-3)
        assert (result.get_response().model_version, result.get_response().id) == (version or "3", "abc")


def test_large_requests_that_repeat_each_get_their_own_answer(channel: grpc.Channel) -> None:
    infer = channel.unary_unary(
        SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
    )
    waiting = []
    for number in range(8):
        request = pb.ModelInferRequest(model_name="mlp", id=f"{number}" * 300_000)
        request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
        request.raw_input_contents.append(np.full(64, number, np.float16).tobytes())
        waiting.append(infer.future(request, timeout=60))
    first, second = (w.astype(np.float32) for w in mlp_weights())
    for number, answer in enumerate(waiting):
        assert answer.result().id == f"{number}" * 300_000
        y = np.frombuffer(answer.result().raw_output_contents[0], np.float16)
        np.testing.assert_allclose(y, np.maximum(np.full(64, number) @ first, 0) @ second, rtol=1e-2, atol=4e-2)


@pytest.mark.parametrize("wire", [row.wire for row in DATATYPES if row.numpy is not None])
def test_every_datatype_goes_there_and_back(client: triton.InferenceServerClient, wire: str) -> None:
    inputs = []
    for row in DATATYPES:
        if row.numpy is not None:
            array = np.array([[b"a", b"\x00"]], object) if row.wire == "BYTES" else np.array([[0, 1]], row.numpy)
            inputs.append(tensor(f"in_{row.wire}", array, row.wire))
    result = client.infer("echo_types", inputs, outputs=[triton.InferRequestedOutput(f"out_{wire}")])
    expected = [[b"a", b"\x00"]] if wire == "BYTES" else [[0, 1]]
    assert result.as_numpy(f"out_{wire}").tolist() == expected
    assert len(result.get_response().outputs) == 1


def test_the_best_classes_are_named(client: triton.InferenceServerClient) -> None:
    x = tensor("x", np.random.default_rng(1).standard_normal((2, 64)).astype(np.float16), "FP16")
    scores = client.infer("mlp", [x]).as_numpy("y")
    named = client.infer("mlp", [x], outputs=[triton.InferRequestedOutput("y", class_count=3)]).as_numpy("y")
    assert named.shape == (2, 3)
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    best = int(scores[1].argmax())
    assert named[1, 0] == f"{float(scores[1, best]):.6f}:{best}:{digits[best]}".encode()


def test_an_output_that_is_asked_for_twice_comes_once(client: triton.InferenceServerClient) -> None:
    outputs = [triton.InferRequestedOutput("y"), triton.InferRequestedOutput("y")]
    result = client.infer("mlp", [tensor("x", np.zeros((1, 64), np.float16), "FP16")], outputs=outputs)
    assert [output.name for output in result.get_response().outputs] == ["y"]


def test_the_best_classes_of_an_output_that_is_not_there_are_refused(client: triton.InferenceServerClient) -> None:
    x = tensor("x", np.zeros((1, 64), np.float16), "FP16")
    with pytest.raises(InferenceServerException, match="output 'nope' is not one of the model's: 'y'"):
        client.infer("mlp", [x], outputs=[triton.InferRequestedOutput("nope", class_count=3)])


def test_a_model_without_a_batch_dimension_is_served(client: triton.InferenceServerClient) -> None:
    result = client.infer("unbatched", [tensor("x", np.array([1, 2, 3], np.float32), "FP32")])
    assert result.as_numpy("y").tolist() == [2, 4, 6]


def test_what_the_server_says_of_itself(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp", "3")
    metadata = client.get_server_metadata()
    assert (metadata.name, metadata.version) == ("halfserve", "0.0.test")
    assert "statistics" in metadata.extensions
    mlp = client.get_model_metadata("mlp")
    assert (list(mlp.versions), mlp.platform) == (["1", "3"], "onnxruntime_onnx")
    assert [(t.name, t.datatype, list(t.shape)) for t in mlp.inputs] == [("x", "FP16", [-1, 64])]
    config = client.get_model_config("mlp").config
    assert (config.max_batch_size, list(config.input[0].dims), config.HasField("dynamic_batching")) == (16, [64], True)
    index = client.get_model_repository_index()
    assert [(m.name, m.version, m.state) for m in index.models if m.name == "mlp"] == [
        ("mlp", "1", "READY"),
        ("mlp", "3", "READY"),
    ]


def test_what_is_not_there_is_not_ready(client: triton.InferenceServerClient) -> None:
    assert not client.is_model_ready("nope")
    assert not client.is_model_ready("mlp", "9")
    for model in ("mlp", "nope"):
        with pytest.raises(InferenceServerException, match="model version 'x' is not a number") as refused:
            client.is_model_ready(model, "x")
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_statistics_count_as_perf_analyzer_expects(client: triton.InferenceServerClient) -> None:
    def stats() -> Any:
        return client.get_inference_statistics("unbatched", "1").model_stats[0]

    before = stats()
    for _ in range(3):
        client.infer("unbatched", [tensor("x", np.ones(3, np.float32), "FP32")])
    after = stats()
    assert after.inference_count - before.inference_count == 3
    assert after.execution_count - before.execution_count == 3
    for stage in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        counts = [getattr(s.inference_stats, stage).count for s in (before, after)]
        assert counts[1] - counts[0] == 3, stage
    assert after.last_inference >= before.last_inference > -1
    everything = client.get_inference_statistics().model_stats
    assert {(s.name, s.version) for s in everything} >= {("mlp", "1"), ("mlp", "3"), ("picky", "1")}
    assert len(client.get_inference_statistics("", "1").model_stats) == len(everything)  # as in Triton


@pytest.mark.parametrize(
    ("model", "version", "inputs", "status", "text"),
    [
        ("nope", "", [("x", (1, 64), "FP16")], "NOT_FOUND", "model 'nope' is not served here"),
        ("mlp", "2", [("x", (1, 64), "FP16")], "NOT_FOUND", "model 'mlp' has no version 2; served: 1, 3"),
        ("mlp", "one", [("x", (1, 64), "FP16")], "INVALID_ARGUMENT", "model version 'one' is not a number"),
        ("mlp", "", [("q", (1, 64), "FP16")], "INVALID_ARGUMENT", "input 'q' is not one of the model's: 'x'"),
        ("mlp", "", [("x", (1, 63), "FP16")], "INVALID_ARGUMENT", r"input 'x' has shape [1, 63], expected [-1, 64]"),
        ("mlp", "", [("x", (1, 64), "FP32")], "INVALID_ARGUMENT", "input 'x' has datatype 'FP32', expected 'FP16'"),
        ("mlp", "", [("x", (17, 64), "FP16")], "INVALID_ARGUMENT", "the batch size is 17, expected 1 to 16"),
        ("picky", "", [("i", (1, 1), "INT64")], "INTERNAL", "the model failed on this request"),
    ],
)
def test_bad_requests_get_the_right_status_and_the_server_goes_on(
    client: triton.InferenceServerClient,
    model: str,
    version: str,
    inputs: list[tuple[str, tuple[int, ...], str]],
    status: str,
    text: str,
) -> None:
    dtypes = {"FP16": np.float16, "FP32": np.float32, "INT64": np.int64}
    sent = [tensor(name, np.full(shape, 9, dtypes[wire]), wire) for name, shape, wire in inputs]
    with pytest.raises(InferenceServerException) as refused:
        client.infer(model, sent, model_version=version)
    assert refused.value.status() == f"StatusCode.{status}"
    assert text in refused.value.message()
    assert client.infer("picky", [tensor("i", np.array([[1]]), "INT64")]).as_numpy("y").tolist() == [[20]]


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_a_text_that_repeats_a_long_name_does_not_cost_the_call_its_status(channel: grpc.Channel, letter: str) -> None:
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString)
    for _ in range(3):
        with pytest.raises(grpc.RpcError) as refused:
            infer(pb.ModelInferRequest(model_name=letter * 20_000), timeout=60)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        details = refused.value.details()
        assert details.startswith(f"model '{letter}{letter}")
        # Its middle is left out first; where its bytes on the wire are still too many, its end too.
        assert details.endswith("; `halfserve models` (RepositoryIndex) lists what is" if letter == "x" else f"{letter} ...")


def test_a_request_with_too_many_fields_is_refused(channel: grpc.Channel) -> None:
    inputs, text = b"\x0a\x03mlp" + b"\x2a\x00" * 40_000, "the request has more than 32768 inputs, outputs, parameters"
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(SERVICE + "ModelInfer")(inputs, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(text)
    (answer,) = channel.stream_stream(SERVICE + "ModelStreamInfer")(iter([inputs]), timeout=60)
    assert pb.ModelStreamInferResponse.FromString(answer).error_message.startswith(text)


NO_TIMEOUT = "parameter 'timeout' is not a whole number of 0 or more, expected microseconds"


@pytest.mark.parametrize(
    ("shape", "size", "parameter", "text"),
    [
        (range(1000), 128, {}, f"input 'x' has shape [{', '.join(map(str, range(16)))}, ...], expected 2 dimensions: [-1, 64]"),
        ([1, 64], 127, {}, "input 'x' has 127 bytes, expected 128 for FP16 of shape [1, 64]"),
        ([1, 64], 128, {"string_param": "5"}, NO_TIMEOUT),
        ([1, 64], 128, {"int64_param": -5}, NO_TIMEOUT),
    ],
    ids=["many sizes", "bytes", "timeout of text", "negative timeout"],
)
def test_what_does_not_fit_is_named(
    channel: grpc.Channel, shape: Sequence[int], size: int, parameter: dict[str, Any], text: str
) -> None:
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[bytes(size)])
    request.inputs.add(name="x", datatype="FP16", shape=shape)
    if parameter:
        request.parameters["timeout"].CopyFrom(pb.InferParameter(**parameter))
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, "ModelInfer", request, pb.ModelInferResponse)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in refused.value.details()


def test_bytes_that_are_no_message_do_not_stop_the_server(channel: grpc.Channel, client: triton.InferenceServerClient) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(SERVICE + "ModelInfer")(b"\xff\xff\xff", timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("the request is not a ModelInferRequest message")
    assert client.is_server_ready()


@pytest.mark.parametrize("method", [SERVICE + "NoSuchMethod", "/other.Service/Method"])
def test_a_method_that_is_not_served_says_so(channel: grpc.Channel, method: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(method)(b"", timeout=60)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert f"{method} is not served here" in refused.value.details()


def test_the_asyncio_client_infers_many_at_once(server: RunningServer) -> None:
    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(server.address) as client:
            assert await client.is_model_ready("mlp")
            inputs = [tensor("x", np.full((1, 64), value, np.float16), "FP16") for value in range(8)]
            return await asyncio.gather(*(client.infer("mlp", [each]) for each in inputs))

    first, second = (w.astype(np.float32) for w in mlp_weights())
    for value, result in enumerate(asyncio.run(ask())):
        expected = np.maximum(np.full((1, 64), value) @ first, 0) @ second
        np.testing.assert_allclose(result.as_numpy("y"), expected, rtol=1e-3, atol=4e-3)


def test_a_message_beyond_grpcs_default_limit_is_taken(client: triton.InferenceServerClient) -> None:
    types = [row for row in DATATYPES if row.numpy is not None]
    arrays = {row.wire: np.zeros((1, 1), row.numpy or object) for row in types}
    arrays["BYTES"][...] = b""
    arrays["FP32"] = np.ones((1, 2_000_000), np.float32)  # 8 MB
    inputs = [tensor(f"in_{wire}", array, wire) for wire, array in arrays.items()]
    result = client.infer("echo_types", inputs, outputs=[triton.InferRequestedOutput("out_FP32")])
    assert result.as_numpy("out_FP32").sum() == 2_000_000


def test_health_is_checked_and_watched(server: RunningServer, channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "inference.GRPCInferenceService", "mlp"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status == 1
    with pytest.raises(grpc.RpcError, match="'nope' is neither a service nor a model here"):
        health.Check(health_pb2.HealthCheckRequest(service="nope"), timeout=60)
    watched = health.Watch(health_pb2.HealthCheckRequest(service="nope"), timeout=60)
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watched.cancel()


def test_reflection_describes_the_service(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
    ]
    services, files = stub.ServerReflectionInfo(iter(questions), timeout=60)
    names = {service.name for service in services.list_services_response.service}
    assert names >= {"inference.GRPCInferenceService", "grpc.health.v1.Health"}
    descriptors = map(descriptor_pb2.FileDescriptorProto.FromString, files.file_descriptor_response.file_descriptor_proto)
    assert "inference.proto" in {descriptor.name for descriptor in descriptors}


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("127.0.0.1", None, "Address already in use; choose another --grpc-port"),
        ("198.51.100.1", 0, "cannot listen on 198.51.100.1:0: "),
        ("no such host", 0, "cannot listen on no such host:0: "),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_refused(
    server: RunningServer, transport: MakeTransport, host: str, port: int | None, text: str
) -> None:
    taken = int(server.address.rpartition(":")[2])

    async def start() -> None:
        await transport(Service(server.core, server_version=""), host, taken if port is None else port).start()

    with pytest.raises(BindError, match=text):
        server.run(start())
