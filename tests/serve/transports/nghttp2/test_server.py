from __future__ import annotations

import asyncio
import gc
import queue
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from ngh2 import ResponseReceived

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.protocol.inference_stream import InferenceStream
from halfserve.serve.protocol.service import Service
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.nghttp2.calls import InferCall
from halfserve.serve.transports.nghttp2.connection import GrpcConnection
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from halfserve.serve.transports.nghttp2.streams import InferStreamCall, StreamCall
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import WAIT_S, RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import (
    INFER,
    INFER_STREAM,
    SERVER_LIVE,
    Http2Peer,
    call_headers,
    mlp_request,
    peer,
    serves,
)
from tests.serve.transports.test_infer_stream import stream_stub
from tests.serve.transports.test_under_load import held_request, infer_stub, wait_until_waiting

ROWS = 2**19  # 2 MiB
WATCH = b"/grpc.health.v1.Health/Watch"
OF_CALLS = (InferCall, InferStreamCall, InferenceStream, InferRequest, StreamCall, GrpcConnection)

Scene = Callable[[RunningServer, grpc.Channel, HeldBackend], object]


def test_what_is_not_http2_is_closed(nghttp2: RunningServer) -> None:
    with Http2Peer(nghttp2.address) as stranger:
        stranger.socket.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stranger.is_closed_by_server()
    assert serves(nghttp2)


@pytest.mark.parametrize("path", [b"/grpc.health.v1.Health/Watch", INFER_STREAM, INFER, SERVER_LIVE])
@pytest.mark.parametrize("broken", [b"\0\0\1\6\0\0\0\0\0\0", b"\0\0\1\x09\0\0\0\0\1\0"], ids=["PING", "CONTINUATION"])
def test_a_call_whose_connection_breaks_in_the_same_segment_logs_nothing(
    nghttp2: RunningServer, caplog: pytest.LogCaptureFixture, path: bytes, broken: bytes
) -> None:
    with peer(nghttp2) as stranger:
        stream = stranger.http2.send_request(call_headers(path))
        stranger.http2.send_data(stream, frame(b"") + frame(bytes(9))[:7])
        stranger.socket.sendall(stranger.http2.data_to_send() + broken)
        assert stranger.is_closed_by_server()
    assert serves(nghttp2)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b":method", b"GET"), *call_headers()[1:]], b"405"),
        ([*call_headers()[:4], (b"content-type", b"text/plain")], b"415"),
    ],
)
def test_http2_that_is_no_call_gets_a_plain_answer(
    nghttp2: RunningServer, headers: list[tuple[bytes, bytes]], status: bytes
) -> None:
    with peer(nghttp2) as other:
        stream = other.http2.send_request(headers)
        other.push()
        answered = other.until(ResponseReceived, stream)
        assert isinstance(answered, ResponseReceived)
        assert dict(answered.headers)[b":status"] == status


@pytest.mark.parametrize(
    ("path", "headers", "data", "code", "text"),
    [
        (INFER, {}, b"", 3, "the call ended without a message, expected one"),
        (INFER, {}, frame(mlp_request())[:-1], 3, "the call ended inside a message"),
        (INFER, {}, frame(mlp_request()) * 2, 3, "a second message came, expected one; this method is no stream"),
        (INFER, {}, b"\1\0\0\0\1x", 3, "a message is marked as compressed, the call names no grpc-encoding"),
        (INFER, {"grpc_encoding": b"br"}, b"\1\0\0\0\1x", 12, "grpc-encoding 'br' is not known here"),
        (INFER, {"grpc_timeout": b"soon"}, frame(mlp_request()), 3, "grpc-timeout is 'soon', expected digits and a unit"),
        (INFER, {}, b"\0\xff\xff\xff\xff", 8, "a message of 4294967295 bytes is too large"),
        (SERVER_LIVE, {}, frame(b"\xff\xff"), 3, "the request is not a ServerLiveRequest message"),
        (b"/a/b", {}, frame(b""), 12, "/a/b is not served here; server reflection lists what is"),
    ],
)
def test_a_broken_call_ends_with_its_status(
    nghttp2: RunningServer, path: bytes, headers: dict[str, bytes], data: bytes, code: int, text: str
) -> None:
    with peer(nghttp2) as other:
        stream = other.call(data, path, **headers)
        assert other.status(stream)[0] == code
        assert text in other.status(stream)[1]
        assert other.status(other.call(frame(b""), SERVER_LIVE)) == (0, "")


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_taken(nghttp2: RunningServer, kind: grpc.Compression) -> None:
    with grpc.insecure_channel(nghttp2.address, compression=kind) as channel:
        infer = channel.unary_unary(INFER.decode(), response_deserializer=pb.ModelInferResponse.FromString)
        assert len(infer(mlp_request(16), timeout=60).raw_output_contents) == 1


@contextmanager
def stopping_server(backend: HeldBackend) -> Iterator[tuple[RunningServer, Callable[[float], threading.Thread]]]:
    """A server, and what begins to stop its transport, with so many seconds of grace."""
    transports: list[Nghttp2Server] = []

    def make(service: Service, host: str, port: int) -> Nghttp2Server:
        transports.append(Nghttp2Server(service, host, port))
        return transports[0]

    with running_server(lambda: [held_model(backend, max_rows=ROWS)], make) as server:

        def stop(grace_s: float) -> threading.Thread:
            stopping = threading.Thread(target=server.run, args=(transports[0].stop(grace_s),))
            stopping.start()
            while not server.call(lambda: transports[0]._closing):
                pass
            return stopping

        yield server, stop


def held_body(rows: int) -> bytes:
    request = pb.ModelInferRequest(model_name="held", raw_input_contents=[np.ones(rows, np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[rows, 1])
    return request.SerializeToString()


@pytest.mark.parametrize("data", [b"", frame(b"\xff")], ids=["nothing to answer", "answered at once"])
def test_a_stream_that_is_given_up_as_it_ends_costs_itself(nghttp2: RunningServer, data: bytes) -> None:
    with peer(nghttp2) as other:
        stream = other.http2.send_request(call_headers(INFER_STREAM))
        other.http2.send_data(stream, data, end_stream=True)
        end = other.http2.data_to_send()
        other.http2.reset_stream(stream)
        other.socket.sendall(end + other.http2.data_to_send())  # one after the other, and read together
        assert other.status(other.call(frame(b""), SERVER_LIVE)) == (0, "")


def test_a_call_in_flight_ends_well_while_the_server_stops() -> None:
    backend = HeldBackend(held=True)
    with stopping_server(backend) as (server, stop), grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary(INFER.decode(), response_deserializer=pb.ModelInferResponse.FromString)
        running = infer.future(held_body(1), timeout=60)
        assert backend.entered.wait(60)
        stopping = stop(20.0)
        backend.release.set()
        assert np.frombuffer(running.result(60).raw_output_contents[0], np.float32).tolist() == [2]
        stopping.join(60)
        assert not stopping.is_alive()


def test_an_answer_that_is_read_bit_by_bit_is_whole_though_the_server_stops() -> None:
    """More than the client's window, and than a socket holds; and beside a stream that does not end by itself."""
    backend = HeldBackend(held=True)
    with stopping_server(backend) as (server, stop), peer(server) as slow:
        watch = slow.http2.send_request(call_headers(b"/grpc.health.v1.Health/Watch"))
        slow.http2.send_data(watch, frame(b""))
        stream = slow.http2.send_request(call_headers())
        slow.http2.send_data(stream, frame(held_body(ROWS)), end_stream=True)
        while slow.http2.queued_body_size():
            assert slow.read()
        assert backend.entered.wait(60)
        stopping = [stop(20.0)]
        backend.release.set()
        server.run(server.core.drain())
        stopping.append(stop(0.0))  # of what is in flight no more than the stream is left
        assert slow.status(stream) == (0, "")
        (output,) = pb.ModelInferResponse.FromString(slow.body(stream)[5:]).raw_output_contents
        assert output == np.full(ROWS, 2, np.float32).tobytes()
        for one in stopping:
            one.join(60)
            assert not one.is_alive()


def test_tls_with_alpn(repository: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    make = partial(Nghttp2Server, tls=context)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with running_server(lambda: load_repository(repository), make) as server:
        address = f"localhost:{server.address.rpartition(':')[2]}"
        with grpc.secure_channel(address, credentials) as channel:
            assert channel.unary_unary(INFER.decode())(mlp_request(), timeout=60)
        with Http2Peer(server.address) as plain:
            plain.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert plain.is_closed_by_server()


def test_nothing_is_left_of_clients_that_are_gone(nghttp2: RunningServer) -> None:
    for _ in range(3):
        with peer(nghttp2) as leaving:
            stream = leaving.http2.send_request(call_headers())
            leaving.http2.send_data(stream, frame(mlp_request())[:30])
            leaving.push()

    async def alone() -> bool:
        return len(asyncio.all_tasks()) <= 1

    while not nghttp2.run(alone()):
        pass
    assert serves(nghttp2)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in OF_CALLS]


def cancelled(server: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    stub = infer_stub(channel)
    computed = stub.future(held_request(1))
    assert backend.entered.wait(WAIT_S)
    calls = [computed, *(stub.future(held_request(value)) for value in (2, 3))]
    wait_until_waiting(server, 2)
    for call in calls:
        call.cancel()
    wait_until_waiting(server, 0)
    return calls


def cut_off(server: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    stub = infer_stub(channel)
    computed = stub.future(held_request(1))
    assert backend.entered.wait(WAIT_S)
    calls = [computed, stub.future(held_request(2))]
    wait_until_waiting(server, 1)
    channel.close()
    wait_until_waiting(server, 0)
    return calls


def too_late(_: RunningServer, channel: grpc.Channel, __: HeldBackend) -> object:
    stub = infer_stub(channel)
    calls = [stub.future(held_request(value), timeout=0.2) for value in (1, 2)]
    assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    return calls


def refused(_: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    backend.release.set()
    request = held_request(1)
    request.inputs[0].shape[:] = [1, 2]
    call = infer_stub(channel).future(request)
    assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    return None


def stream_left(server: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    more: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
    stream = stream_stub(channel)(iter(more.get, None), timeout=WAIT_S)
    more.put(held_request(1))
    assert backend.entered.wait(WAIT_S)
    for value in (2, 3):
        more.put(held_request(value))
    wait_until_waiting(server, 2)
    stream.cancel()
    wait_until_waiting(server, 0)
    more.put(None)
    return stream


def watch_left(_: RunningServer, channel: grpc.Channel, __: HeldBackend) -> object:
    watch = channel.unary_stream(WATCH.decode())(b"", timeout=WAIT_S)
    next(watch)
    watch.cancel()
    return watch


def watch_cut_off(server: RunningServer, _: grpc.Channel, __: HeldBackend) -> object:
    with peer(server) as leaving:  # before the watch has begun
        leaving.http2.send_data(leaving.http2.send_request(call_headers(WATCH)), frame(b""), end_stream=True)
        leaving.http2.reset_stream(1, 8)
        assert leaving.status(leaving.call(frame(b""), SERVER_LIVE)) == (0, "")
    return None


def stream_ended(_: RunningServer, channel: grpc.Channel, backend: HeldBackend) -> object:
    backend.release.set()
    assert len(list(stream_stub(channel)(iter([held_request(1), held_request(-1)]), timeout=WAIT_S))) == 2
    return None


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("scene", [cancelled, cut_off, too_late, refused, stream_left, stream_ended, watch_left, watch_cut_off])
def test_nothing_is_left_of_a_call(scene: Scene) -> None:
    backend = HeldBackend(held=True)
    before = alive()  # such as connections to servers that tests share
    others = set(map(id, before))
    with running_server(lambda: [held_model(backend)], Nghttp2Server) as server:
        with grpc.insecure_channel(server.address) as channel:
            try:
                scene(server, channel, backend)
            finally:
                backend.release.set()
        server.until(lambda: {id(one) for one in alive()} <= others)
