"""gRPC statuses as exceptions, and answers that no correct server gives: each ends in a ClientError, never in a wrong array."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from halfserve import ClientError, DeadlineExceeded
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client import errors
from halfserve.serve.client.errors import WRITE_FAILED, Repeat, from_rpc_error
from halfserve.serve.engine.errors import LISTING
from tests.serve.benchmark.load.scripted_peer import HEADERS, OK, Peer, peer
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import ScriptedServer

WAIT_S = 60.0
ROW: dict[str, Any] = {"x": [[1.0, 2.0]]}


class FailedCall:
    """What grpc and grpc.aio raise, as far as it is looked at."""

    def __init__(self, code: str, details: str | None, trailers: Any = ()) -> None:
        self._code, self._details, self._trailers = grpc.StatusCode[code], details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def translated(code: str, details: str | None, trailers: Any = ()) -> ClientError:
    return from_rpc_error(FailedCall(code, details, trailers), method="ModelInfer", address="h:1", timeout_s=2.5)


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        ("INVALID_ARGUMENT", "bad shape", errors.InvalidRequest, "bad shape"),
        ("NOT_FOUND", "no model", errors.ModelNotFound, "no model"),
        ("RESOURCE_EXHAUSTED", "queue full", errors.Overloaded, "queue full"),
        ("UNAVAILABLE", "the server is stopping", errors.ServerUnavailable, "the server is stopping"),
        ("DEADLINE_EXCEEDED", "expired in the queue", errors.DeadlineExceeded, "expired in the queue"),
        ("INTERNAL", "the model failed", ClientError, "the model failed"),
        (
            "NOT_FOUND",
            f"model 'm' is not served here; {LISTING} lists what is",
            errors.ModelNotFound,
            "model 'm' is not served here; `halfserve models --address h:1` lists what is",
        ),
        ("UNIMPLEMENTED", "no shared memory here", errors.Unsupported, "no shared memory here"),
        ("UNIMPLEMENTED", "Method not found!", errors.Unsupported, "the server at h:1 does not offer ModelInfer"),
        ("INTERNAL", None, ClientError, "h:1 answered ModelInfer with INTERNAL and no explanation"),
        (
            "RESOURCE_EXHAUSTED",
            "Received message larger than max (9 vs. 4)",
            errors.InvalidRequest,
            r"the message is too big for the server at h:1: Received message larger than max \(9 vs. 4\)",
        ),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.DeadlineExceeded, r"h:1 did not answer ModelInfer within 2.5 s; .*"),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused (111)",
            errors.ServerUnavailable,
            r"no server answers at h:1 \(connection refused\); start one with: halfserve serve PATH --grpc-port 1",
        ),
        (
            "UNAVAILABLE",
            "connections to all backends failing; last error: UNKNOWN: ipv4:1.2.3.4:1: Failed to connect: Connection refused",
            errors.ServerUnavailable,
            r"no server answers at h:1 \(connection refused\); start one with: halfserve serve PATH --grpc-port 1",
        ),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNAVAILABLE: Handshake read failed",
            errors.ServerUnavailable,
            r"the TLS handshake with h:1 failed; does the server ask for a client certificate\? \(.*\)",
        ),
        ("INTERNAL", "Internal error from Core", errors.ServerUnavailable, "h:1 closed the connection; is the server.*"),
        ("UNAVAILABLE", "DNS resolution failed for h:1", errors.ServerUnavailable, "no server answers at h:1; .*"),
        ("UNAVAILABLE", "Socket closed", errors.ServerUnavailable, "h:1 closed the connection; is the server still running.*"),
        (
            "UNAVAILABLE",
            "Trying to connect an http1.x server",
            errors.ServerUnavailable,
            "h:1 answers in HTTP/1, not gRPC; is it the HTTP port.*",
        ),
    ],
)
def test_a_status_becomes_an_exception(code: str, details: str | None, kind: type[Exception], text: str) -> None:
    error = translated(code, details)
    assert type(error) is kind
    assert error.code == ("UNAVAILABLE" if details == WRITE_FAILED else code)
    with pytest.raises(kind, match=f"^{text}$"):
        raise error


@pytest.mark.parametrize(
    ("details", "repeat"),
    [
        ("connections to all backends failing; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused", Repeat.SAFE),
        ("connections to all backends failing; last error: UNAVAILABLE: ipv4:1.2.3.4:1: Socket closed", Repeat.SAFE),
        ("failed to connect to all addresses; last error: UNAVAILABLE: recvmsg:Connection reset by peer", Repeat.SAFE),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: tcp handshaker shutdown", Repeat.SAFE),
        ("Socket closed", Repeat.IF_IDEMPOTENT),
        ("recvmsg:Connection reset by peer", Repeat.IF_IDEMPOTENT),
    ],
)
def test_a_call_that_was_never_sent_may_be_repeated(details: str, repeat: Repeat) -> None:
    assert translated("UNAVAILABLE", details).repeat is repeat


@pytest.mark.parametrize(
    ("code", "trailers"), [("UNAVAILABLE", (("grpc-retry-pushback-ms", "9" * 400),)), ("DEADLINE_EXCEEDED", ())]
)
def test_a_malformed_hint_or_a_queue_that_is_too_long_forbid_a_repetition(code: str, trailers: Any) -> None:
    assert translated(code, "the model's queue is too long", trailers).repeat is Repeat.NO


@pytest.mark.parametrize(
    ("trailers", "seconds"),
    [
        ((("grpc-retry-pushback-ms", "1500"),), 1.5),
        ((("other", "1"), ("grpc-retry-pushback-ms", "0")), 0.0),
        ((("grpc-retry-pushback-ms", "-1"),), None),
        ((("grpc-retry-pushback-ms", "9" * 10),), 9_999_999.999),
        ((("grpc-retry-pushback-ms", "9" * 19),), None),
        ((("grpc-retry-pushback-ms", "9" * 400),), None),
        ((("grpc-retry-pushback-ms", "9" * 5000),), None),
        ((), None),
        (None, None),
    ],
)
def test_the_retry_hint(trailers: Any, seconds: float | None) -> None:
    assert translated("RESOURCE_EXHAUSTED", "full", trailers).retry_after_s == seconds


def test_every_error_can_be_caught_as_one() -> None:
    kinds = ClientError.__subclasses__()
    assert len({kind.code for kind in kinds} | {ClientError.code}) == len(kinds) + 1 == 10


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
            with pytest.raises(ClientError, match=r"no message|deserializing") as caught:
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
def test_an_answer_to_another_request_is_refused(model: ScriptedServer, connect: Connect, given: Any, text: str) -> None:
    model.answers["ModelInfer"] = [given]
    streamed = pb.ModelStreamInferResponse(infer_response=given)
    streamed.infer_response.id = "0"
    model.answers["ModelStreamInfer"] = [streamed]
    client = connect(model.address)
    with pytest.raises(ClientError, match=text) as caught:
        client.infer("m", ROW, outputs=["y"], request_id="7")
    assert caught.value.code == "INTERNAL"
    if not given.id:
        (answer,) = client.stream_infer("m", [ROW], outputs=["y"])
        with pytest.raises(ClientError, match=text):
            _ = answer.outputs


def test_a_missing_or_made_up_id_is_accepted(model: ScriptedServer, connect: Connect) -> None:
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
def test_an_answer_that_does_not_fill_the_array_is_refused(
    model: ScriptedServer, connect: Connect, given: Any, text: str
) -> None:
    model.answers["ModelInfer"] = [given]
    client = connect(model.address)
    with client.shared_region(4096) as region, pytest.raises(ClientError, match=text) as caught:
        client.infer("m", ROW, into={"y": region.array((1, 2), np.float32)})
    assert caught.value.code == "INTERNAL"


def test_an_unfinished_answer_ends_at_the_deadline(connect: Connect) -> None:
    def begin(server: Peer, stream: int) -> None:
        server.http2.send_response(stream, HEADERS)
        server.http2.send_data(stream, b"\0\0\0\0\5ab")

    with peer(begin) as (host, port):
        client = connect(f"{host}:{port}", timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=rf"^{host}:{port} did not answer ServerMetadata within 0.2 s; allow more"):
            client.server_metadata()


def test_requests_carry_the_requested_model_name(model: ScriptedServer, connect: Connect) -> None:
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


LONG = 2**16  # bytes from which the clients split messages themselves


def long_response() -> pb.ModelInferResponse:
    made = pb.ModelInferResponse(model_name="m", model_version="4", id="0")
    made.parameters["n"].int64_param = 5
    texts = [b"a" * LONG, b""]
    for name, datatype, raw in (
        ("y", "BF16", np.full(LONG, 0x3F80, np.uint16).tobytes()),
        ("z", "BYTES", b"".join(len(text).to_bytes(4, "little") + text for text in texts)),
        ("b", "BOOL", bytes([2, 0])),
        ("e", "FP32", b""),
    ):
        size = {"BF16": len(raw) // 2, "FP32": 0}.get(datatype, 2)
        made.outputs.add(name=name, datatype=datatype, shape=[size])
        made.raw_output_contents.append(raw)
    return made


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_large_answer_arrives_whole(model: ScriptedServer, connect: Connect, compression: Any) -> None:
    given = long_response()
    unknown_group = b"\x53\x32\x01a\x54"  # protobuf skips it
    model.answers["ModelInfer"] = [given, given, given.SerializeToString() + unknown_group]
    model.answers["ModelStreamInfer"] = [pb.ModelStreamInferResponse(infer_response=given)]
    client = connect(model.address, compression=compression)
    x = np.ones((LONG, 2), np.float32)
    detailed = client.infer_detailed("m", {"x": x})
    assert client.infer_message(pb.ModelInferRequest()) == given
    (streamed,) = client.stream_infer("m", [{"x": x}])
    assert (detailed.model, detailed.version, detailed.request_id) == ("m", "4", "0")
    for parameters, outputs in (
        (detailed.parameters, detailed.outputs),
        (streamed.parameters, streamed.outputs),
        ({"n": 5}, client.infer("m", {"x": x})),
    ):
        assert parameters == {"n": 5}
        assert list(outputs) == ["y", "z", "b", "e"]
        assert (outputs["y"].astype(np.float32) == 1).all()
        assert outputs["z"].tolist() == [b"a" * LONG, b""]
        assert outputs["b"].tolist() == [True, False]
        assert outputs["e"].shape == (0,)
        # The caller's own memory: no array keeps the whole answer alive.
        assert all(array.flags.writeable for array in outputs.values())
        assert all(array.base is None or array.base.nbytes == array.nbytes for array in outputs.values())
    sent = {pb.ModelInferRequest.FromString(body).raw_input_contents[0] for _, body, _ in model.calls if len(body) > LONG}
    assert sent == {x.tobytes()}


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (long_response().SerializeToString()[:-1], "Exception deserializing|no message, or none that can be read"),
        (long_response().SerializeToString() + b"\x0a\x01\xff", "Exception deserializing|no message, or none that can be read"),
        (response(*range(LONG)), r"has 262144 bytes, expected 8"),
    ],
    ids=["cut", "no text", "contradiction"],
)
def test_a_large_answer_that_is_wrong_is_refused(model: ScriptedServer, connect: Connect, sent: Any, text: str) -> None:
    if isinstance(sent, pb.ModelInferResponse):
        sent.outputs[0].shape[1] = 2
    model.answers["ModelInfer"] = [sent]
    with pytest.raises(ClientError, match=text) as caught:
        connect(model.address).infer("m", ROW)
    assert caught.value.code == "INTERNAL"
