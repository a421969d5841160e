"""What clients do that are broken, hostile or just slow. Whatever it is, the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from ngh2 import GoAwayReceived, ResponseReceived

from protos import inference_pb2 as pb
from serve.protocol.service import Service
from serve.transports.grpc_framing import MessageReader, frame
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2_server import Nghttp2Server
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.transports.http2_peer import INFER, Http2Peer, call_headers, peer

SERVER_LIVE = b"/inference.GRPCInferenceService/ServerLive"
INFER_STREAM = b"/inference.GRPCInferenceService/ModelStreamInfer"
INITIAL_WINDOW_SIZE = 4
Limited = Callable[..., RunningServer]


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[RunningServer]:
    with running_server(lambda: load_repository(repository), Nghttp2Server) as running:
        yield running


@pytest.fixture
def limited(repository: Path) -> Iterator[Limited]:
    """Starts a server with limits of its own."""
    contexts = []

    def start(**limits: Any) -> RunningServer:
        make = partial(Nghttp2Server, limits=TransportLimits(sweep_s=0.01, **limits))
        contexts.append(running_server(lambda: load_repository(repository), make))
        return contexts[-1].__enter__()

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def mlp_request(rows: int = 1) -> bytes:
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[bytes(128 * rows)])
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 64])
    return request.SerializeToString()


def serves(server: RunningServer) -> bool:
    with peer(server) as other:
        stream = other.http2.send_request(call_headers())
        other.http2.send_data(stream, frame(mlp_request()), end_stream=True)
        other.push()
        return other.status(stream) == (0, "") and len(pb.ModelInferResponse.FromString(other.body(stream)[5:]).outputs) == 1


def test_what_is_not_http2_is_closed(server: RunningServer) -> None:
    with Http2Peer(server.address) as stranger:
        stranger.socket.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stranger.is_closed_by_server()
    assert serves(server)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b":method", b"GET"), *call_headers()[1:]], b"405"),
        ([*call_headers()[:4], (b"content-type", b"text/plain")], b"415"),
    ],
)
def test_http2_that_is_no_call_gets_a_plain_answer(
    server: RunningServer, headers: list[tuple[bytes, bytes]], status: bytes
) -> None:
    with peer(server) as other:
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
    server: RunningServer, path: bytes, headers: dict[str, bytes], data: bytes, code: int, text: str
) -> None:
    with peer(server) as other:
        stream = other.http2.send_request(call_headers(path, **headers))
        other.http2.send_data(stream, data, end_stream=True)
        other.push()
        assert other.status(stream)[0] == code
        assert text in other.status(stream)[1]
        good = other.http2.send_request(call_headers(SERVER_LIVE))
        other.http2.send_data(good, frame(b""), end_stream=True)
        other.push()
        assert other.status(good) == (0, "")


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_taken(server: RunningServer, kind: grpc.Compression) -> None:
    with grpc.insecure_channel(server.address, compression=kind) as channel:
        infer = channel.unary_unary(INFER.decode(), response_deserializer=pb.ModelInferResponse.FromString)
        assert len(infer(mlp_request(16), timeout=20).raw_output_contents) == 1


def test_a_client_that_says_nothing_is_closed(limited: Limited) -> None:
    server = limited(handshake_s=0.01)
    with Http2Peer(server.address) as silent:
        assert silent.is_closed_by_server()
    assert serves(server)


def test_a_message_that_stops_growing_is_given_up(limited: Limited) -> None:
    server = limited(stall_s=0.01)
    with peer(server) as slow:
        stream = slow.http2.send_request(call_headers())
        slow.http2.send_data(stream, frame(mlp_request())[:20])
        slow.push()
        assert slow.status(stream) == (4, "the rest of the request did not come; send it again")


def test_a_peer_that_does_not_answer_a_ping_is_closed(limited: Limited) -> None:
    server = limited(keepalive_s=0.01, keepalive_timeout_s=0.01)
    with peer(server) as dead:
        assert dead.is_closed_by_server()
    assert serves(server)


def test_an_old_connection_is_told_to_go_and_its_client_notices_nothing(limited: Limited) -> None:
    server = limited(max_age_s=0.0)
    with peer(server) as old:
        while not any(isinstance(event, GoAwayReceived) for event in old.events):
            assert old.read()
    with grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary(INFER.decode())
        for _ in range(20):
            assert infer(mlp_request(), timeout=20, wait_for_ready=True)


def test_more_connections_than_allowed_are_closed(limited: Limited) -> None:
    server = limited(max_connections=1)
    with peer(server) as first:
        stream = first.http2.send_request(call_headers(SERVER_LIVE))
        first.http2.send_data(stream, frame(b""), end_stream=True)
        first.push()
        assert first.status(stream)[0] == 0
        with Http2Peer(server.address) as second:
            assert second.is_closed_by_server()


def test_large_messages_at_once_all_become_whole(limited: Limited) -> None:
    server = limited(max_held_bytes=10_000, stream_window_bytes=65_535, connection_window_bytes=1_000_000)
    body = frame(mlp_request() + bytes([0x1A, 0x80, 0x80, 0x20]) + b"i" * 0x80000)  # a request with an id of half a megabyte
    with grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", -1)]) as channel:
        infer = channel.unary_unary(INFER.decode(), response_deserializer=pb.ModelInferResponse.FromString)
        answers = [infer.future(body[5:], timeout=20) for _ in range(8)]
        assert [len(answer.result(20).id) for answer in answers] == [0x80000] * 8


def test_abandoned_uploads_give_their_window_back(limited: Limited) -> None:
    server = limited(max_held_bytes=1000, connection_window_bytes=100_000)
    with peer(server) as other:
        for _ in range(20):
            kept, dropped = (other.http2.send_request(call_headers()) for _ in range(2))
            other.http2.send_data(kept, frame(bytes(20_000))[:10_000])
            other.http2.send_data(dropped, frame(bytes(20_000))[:15_000])
            other.push()
            other.http2.reset_stream(kept)
            other.http2.reset_stream(dropped)
            other.push()
        stream = other.http2.send_request(call_headers())
        other.http2.send_data(stream, frame(bytes(90_000)), end_stream=True)
        other.push()
        assert other.status(stream)[0] == 3


def test_a_client_that_does_not_read_gets_everything_once_it_does(server: RunningServer) -> None:
    with peer(server, {INITIAL_WINDOW_SIZE: 0}) as slow:
        streams = []
        for _ in range(20):
            streams.append(slow.http2.send_request(call_headers()))
            slow.http2.send_data(streams[-1], frame(mlp_request(16)), end_stream=True)
        slow.push()
        slow.until(ResponseReceived, streams[-1])
        assert slow.body(streams[-1]) == b""
        slow.http2.update_settings({INITIAL_WINDOW_SIZE: 65_535})
        slow.push()
        assert [slow.status(stream) for stream in streams] == [(0, "")] * 20
        assert {len(slow.body(stream)) for stream in streams} == {len(slow.body(streams[0]))}


def test_a_stream_whose_answers_are_not_read_may_send_no_more_until_they_are(limited: Limited) -> None:
    server = limited(stream_window_bytes=65_535, max_unsent_bytes=10_000)
    with peer(server, {INITIAL_WINDOW_SIZE: 0}) as slow:
        stream = slow.http2.send_request(call_headers(INFER_STREAM))
        slow.http2.send_data(stream, frame(mlp_request()) * 3000, end_stream=True)  # over half a megabyte
        slow.push()
        slow.until(ResponseReceived, stream)
        for _ in range(20):  # turns of the server: each is a call that it answers
            other = slow.http2.send_request(call_headers(b"/a/b"), end_stream=True)
            slow.push()
            assert slow.status(other)[0] == 12
        assert slow.http2.queued_body_size(stream) > 100_000
        slow.http2.update_settings({INITIAL_WINDOW_SIZE: 2**31 - 1})
        slow.http2.set_local_window_size(2**31 - 1)
        slow.push()
        assert slow.status(stream) == (0, "")
        answered = list(MessageReader(10_000).feed(slow.body(stream)))
        assert len(answered) == 3000
        assert all(not pb.ModelStreamInferResponse.FromString(answer).error_message for answer in answered)


def give_up(client: Http2Peer, calls: int) -> None:
    """Begin calls and reset each of them at once."""
    with contextlib.suppress(ConnectionError):
        for _ in range(calls):
            stream = client.http2.send_request(call_headers())
            client.push()
            client.http2.reset_stream(stream)
        client.push()


def test_rapid_resets_cost_the_connection_that_sends_them(limited: Limited) -> None:
    server = limited(reset_burst=100, resets_per_s=1)
    with peer(server) as hostile:
        give_up(hostile, 2000)
        assert hostile.is_closed_by_server()
    assert serves(server)


def test_a_client_may_give_up_all_calls_whose_deadlines_pass(server: RunningServer) -> None:
    with peer(server) as late:
        give_up(late, 2000)
        stream = late.http2.send_request(call_headers(SERVER_LIVE))
        late.http2.send_data(stream, frame(b""), end_stream=True)
        late.push()
        assert late.status(stream) == (0, "")


def test_a_flood_of_continuations_is_cut_off(server: RunningServer) -> None:
    with Http2Peer(server.address) as hostile:
        hostile.greet()
        block = b"\x00\x01a" + b"\x7f\x80\x7d" + b"v" * 16_000  # a literal header of sixteen thousand bytes
        headers = struct.pack(">I", len(block))[1:] + b"\x01\x00" + struct.pack(">I", 1) + block
        continuation = struct.pack(">I", len(block))[1:] + b"\x09\x00" + struct.pack(">I", 1) + block
        with contextlib.suppress(ConnectionError):
            hostile.socket.sendall(headers + continuation * 200)
        assert hostile.is_closed_by_server()
    assert serves(server)


def test_a_call_in_flight_ends_well_while_the_server_stops() -> None:
    backend = HeldBackend(held=True)
    transports: list[Nghttp2Server] = []

    def make(service: Service, host: str, port: int) -> Nghttp2Server:
        transports.append(Nghttp2Server(service, host, port))
        return transports[0]

    with running_server(lambda: [held_model(backend)], make) as server, grpc.insecure_channel(server.address) as channel:
        request = pb.ModelInferRequest(model_name="held", raw_input_contents=[np.float32(1).tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        infer = channel.unary_unary(INFER.decode(), response_deserializer=pb.ModelInferResponse.FromString)
        running = infer.future(request.SerializeToString(), timeout=20)
        assert backend.entered.wait(20)
        stopping = threading.Thread(target=server.run, args=(transports[0].stop(20.0),))
        stopping.start()
        while not server.call(lambda: transports[0].is_closing):
            pass
        backend.release.set()
        assert np.frombuffer(running.result(20).raw_output_contents[0], np.float32).tolist() == [2]
        stopping.join(20)
        assert not stopping.is_alive()


def test_tls_with_alpn(repository: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    make = partial(Nghttp2Server, tls=context)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with running_server(lambda: load_repository(repository), make) as server:
        address = f"localhost:{server.address.rpartition(':')[2]}"
        with grpc.secure_channel(address, credentials) as channel:
            assert channel.unary_unary(INFER.decode())(mlp_request(), timeout=20)
        with Http2Peer(server.address) as plain:
            plain.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert plain.is_closed_by_server()


def test_nothing_is_left_of_clients_that_are_gone(server: RunningServer) -> None:
    for _ in range(3):
        with peer(server) as leaving:
            stream = leaving.http2.send_request(call_headers())
            leaving.http2.send_data(stream, frame(mlp_request())[:30])
            leaving.push()

    async def alone() -> bool:
        return len(asyncio.all_tasks()) <= 1

    while not server.run(alone()):
        pass
    assert serves(server)


def test_a_flood_in_one_piece_is_answered_in_full(server: RunningServer) -> None:
    with peer(server) as eager:
        streams = []
        for _ in range(1000):
            streams.append(eager.http2.send_request(call_headers(SERVER_LIVE)))
            eager.http2.send_data(streams[-1], frame(b""), end_stream=True)
        eager.push()
        assert all(eager.status(stream) == (0, "") for stream in streams)
