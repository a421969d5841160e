from __future__ import annotations

import contextlib
import gzip
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from ngh2 import GoAwayReceived

from halfserve.serve.engine.model import Model
from halfserve.serve.protocol.service import Service
from halfserve.serve.transports import read_scheduler
from halfserve.serve.transports.grpc_framing import PREFIX, frame
from halfserve.serve.transports.nghttp2.connection import GrpcConnection
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.frames import CONTINUATION, ENHANCE_YOUR_CALM, HEADERS, head_of, literal, literals
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.standing_still import StandingLoop
from tests.serve.transports.nghttp2.http2_peer import (
    INFER,
    INFER_STREAM,
    INITIAL_WINDOW_SIZE,
    SERVER_LIVE,
    Http2Peer,
    Limited,
    call_headers,
    mlp_request,
    padded,
    peer,
    serves,
)

HEALTH = b"/grpc.health.v1.Health/"
INDEX = b"/inference.GRPCInferenceService/RepositoryIndex"
SHORT_S, LONG_S = 10.0, 1000.0
EMPTY = frame(b"")


def test_a_message_that_stops_growing_is_given_up(limited: Limited) -> None:
    server = limited(stall_s=0.01)
    with peer(server) as slow:
        stream = slow.http2.send_request(call_headers())
        slow.http2.send_data(stream, frame(mlp_request())[:20])
        slow.push()
        assert slow.status(stream) == (4, "the rest of the request did not come; send it again")


def test_an_old_connection_is_told_to_go_and_its_client_notices_nothing(limited: Limited) -> None:
    server = limited(max_age_s=0.0)
    with peer(server) as old:
        while not any(isinstance(event, GoAwayReceived) for event in old.events):
            assert old.read()
    with grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary(INFER.decode())
        for _ in range(20):
            assert infer(mlp_request(), timeout=60, wait_for_ready=True)


def test_more_connections_than_allowed_are_closed(limited: Limited) -> None:
    server = limited(max_connections=1)
    with peer(server) as first:
        assert first.status(first.call(frame(b""), SERVER_LIVE))[0] == 0
        with Http2Peer(server.address) as second:
            assert second.is_closed_by_server()


@pytest.mark.parametrize("fields", [1, 100, 300])
def test_headers_over_the_limit_cost_their_call_alone(limited: Limited, fields: int) -> None:
    server = limited()
    with peer(server) as shared:  # as a proxy shares it among its clients
        other = shared.http2.send_request(call_headers(SERVER_LIVE))
        shared.push()
        large = [(b"x-%d" % number, b"v" * (20_000 // fields)) for number in range(fields)]
        stream = shared.http2.send_request(call_headers(SERVER_LIVE) + large)
        shared.push()
        code, text = shared.status(stream)
        assert code == 8
        assert re.fullmatch(r"the call's headers take \d+ bytes, expected at most 16384; send less metadata", text)
        shared.http2.send_data(other, frame(b""), end_stream=True)
        shared.push()
        assert shared.status(other) == (0, "")


@pytest.mark.parametrize("kind", ["fields", "repetitions", "continuations", "one field"])
def test_much_longer_headers_end_their_connection(nghttp2: RunningServer, kind: str) -> None:
    """A byte of a compressed list may be a field of it, and each field takes time before the token is looked at."""
    call = literals(call_headers(SERVER_LIVE))
    blocks = {
        "fields": [call + literals([(b"a", b"")] * 2000)],
        "repetitions": [call + b"\x40" + literal(b"a") + literal(b"b") + b"\xbe" * 2000],
        "continuations": [call, *[literals([(b"a", b"v" * 8000)])] * 6],
        "one field": [call + literals([(b"a", b"v" * 40_000)])],
    }[kind]
    frames = [head_of(CONTINUATION if number else HEADERS, 0, 1, len(block)) + block for number, block in enumerate(blocks)]
    with peer(nghttp2) as hostile:
        hostile.socket.sendall(b"".join(frames) + bytes(2**20))  # it goes on sending, and reads the reason all the same
        while not any(isinstance(event, GoAwayReceived) for event in hostile.events):
            assert hostile.read()
        assert [event.error_code for event in hostile.events if isinstance(event, GoAwayReceived)] == [ENHANCE_YOUR_CALM]
        assert hostile.is_closed_by_server()
    assert serves(nghttp2)


def test_who_sends_long_headers_again_and_again_gets_no_more_calls(limited: Limited) -> None:
    server = limited(max_refused=3)
    large = [(b"x-%d" % number, b"v" * 40) for number in range(250)]
    with peer(server) as stubborn:
        before = stubborn.http2.send_request(call_headers(SERVER_LIVE))
        streams = [stubborn.http2.send_request(call_headers(SERVER_LIVE) + large) for _ in range(3)]
        stubborn.push()
        assert [stubborn.status(stream)[0] for stream in streams] == [8, 8, 8]
        while not any(isinstance(event, GoAwayReceived) for event in stubborn.events):
            assert stubborn.read()
        stubborn.http2.send_data(before, frame(b""), end_stream=True)
        stubborn.push()
        assert stubborn.status(before) == (0, "")
        assert stubborn.is_closed_by_server()
        assert ENHANCE_YOUR_CALM in [event.error_code for event in stubborn.events if isinstance(event, GoAwayReceived)]


@pytest.mark.parametrize("path", [HEALTH + b"Check", HEALTH + b"Watch", SERVER_LIVE, INDEX])
@pytest.mark.parametrize("bomb", [False, True])
def test_what_carries_no_tensors_is_small(limited: Limited, path: bytes, *, bomb: bool) -> None:
    server = limited(max_small_message_bytes=50)
    with peer(server) as client:
        payload = gzip.compress(bytes(1000)) if bomb else bytes(51)
        stream = client.call(PREFIX.pack(bomb, len(payload)) + payload, path, grpc_encoding=b"gzip")
        size = "more than 50" if bomb else "51"
        text = f"a message of {size} bytes is too large, expected at most 50; split the request"
        assert client.status(stream) == (8, text)
    assert serves(server)


@pytest.mark.parametrize("path", [INFER, INFER_STREAM, INDEX.replace(b"Index", b"ModelLoad")])
def test_a_message_that_inflates_to_too_much_is_better_sent_as_it_is(limited: Limited, path: bytes) -> None:
    server = limited(max_small_message_bytes=10, max_inflated_bytes=100)
    with peer(server) as client:
        payload = gzip.compress(bytes(1000))
        stream = client.call(PREFIX.pack(1, len(payload)) + payload, path, grpc_encoding=b"gzip")
        text = "a message of more than 100 bytes is too large, expected at most 100; send it uncompressed"
        assert client.status(stream) == (8, text)
    assert serves(server)  # with more than a hundred bytes


def test_the_same_holds_for_calls_that_begin_as_earlier_ones_did(limited: Limited) -> None:
    server = limited(max_small_message_bytes=50)
    with peer(server) as client:
        for size, code in ((50, 0), (50, 0), (50, 0), (51, 8)):
            stream = client.http2.send_request(call_headers(SERVER_LIVE))
            # An unknown field of bytes, which protobuf reads over.
            client.http2.send_data(stream, frame(b"\x7a" + bytes([size - 2]) + bytes(size - 2)), end_stream=True)
            client.push()
            assert client.status(stream)[0] == code


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


def test_a_client_may_give_up_all_calls_whose_deadlines_pass(nghttp2: RunningServer) -> None:
    with peer(nghttp2) as late:
        give_up(late, 2000)
        assert late.status(late.call(frame(b""), SERVER_LIVE)) == (0, "")


def test_a_flood_of_continuations_is_cut_off(nghttp2: RunningServer) -> None:
    with Http2Peer(nghttp2.address) as hostile:
        hostile.greet()
        block = b"\x00\x01a" + b"\x7f\x80\x7d" + b"v" * 16_000  # a literal header of sixteen thousand bytes
        headers = struct.pack(">I", len(block))[1:] + b"\x01\x00" + struct.pack(">I", 1) + block
        continuation = struct.pack(">I", len(block))[1:] + b"\x09\x00" + struct.pack(">I", 1) + block
        with contextlib.suppress(ConnectionError):
            hostile.socket.sendall(headers + continuation * 200)
        assert hostile.is_closed_by_server()
    assert serves(nghttp2)


def test_a_flood_in_one_piece_is_answered_in_full(nghttp2: RunningServer) -> None:
    with peer(nghttp2) as eager:
        streams = []
        for _ in range(1000):
            streams.append(eager.http2.send_request(call_headers(SERVER_LIVE)))
            eager.http2.send_data(streams[-1], frame(b""), end_stream=True)
        eager.push()
        assert all(eager.status(stream) == (0, "") for stream in streams)


def test_floods_that_wait_for_each_other_are_answered_in_full(nghttp2: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_scheduler, "TURN_S", 0.0)  # every other connection has to wait
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(peer(nghttp2)) for _ in range(8)]
        for eager in crowd:
            for _ in range(600):
                stream = eager.http2.send_request(call_headers(SERVER_LIVE))
                eager.http2.send_data(stream, frame(b""), end_stream=True)
        for eager in crowd:
            eager.push()
        assert serves(nghttp2)
        assert all(eager.status(2 * call + 1) == (0, "") for eager in crowd for call in range(600))


class Scene:
    """A server that can stand still."""

    def __init__(self, loop: StandingLoop, server: RunningServer, connections: set[GrpcConnection]) -> None:
        self.server = server
        self._loop = loop
        self._connections = connections

    def stand_still(self, meanwhile: Callable[[], object], seconds: float = LONG_S) -> None:
        self.server.call(lambda: self._loop.stand_still(seconds, meanwhile))

    def until_one_is(self, such: Callable[[GrpcConnection], bool]) -> None:
        self.server.until(lambda: any(map(such, self._connections)))

    def ping(self) -> None:
        for connection in self._connections:
            connection.ping()


@contextmanager
def scene(
    limits: TransportLimits, make_models: Callable[[], list[Model]] = lambda: [held_model(HeldBackend())]
) -> Iterator[Scene]:
    loop = StandingLoop()
    made: list[Nghttp2Server] = []

    def make(service: Service, host: str, port: int) -> Nghttp2Server:
        made.append(Nghttp2Server(service, host, port, limits=limits))
        return made[0]

    with running_server(make_models, make, make_loop=lambda: loop) as server:
        yield Scene(loop, server, made[0]._connections)


def is_live(client: Http2Peer) -> bool:
    return client.status(client.call(EMPTY, SERVER_LIVE)) == (0, "")


def test_a_message_whose_rest_came_meanwhile_is_answered() -> None:
    with scene(TransportLimits(stall_s=SHORT_S)) as stopped, peer(stopped.server) as client:
        stream = client.http2.send_request(call_headers(SERVER_LIVE))
        client.http2.send_data(stream, EMPTY[:1])
        client.push()
        stopped.until_one_is(lambda connection: connection.session.calls > 0)
        client.http2.send_data(stream, EMPTY[1:], end_stream=True)
        stopped.stand_still(client.push)
        assert client.status(stream) == (0, "")


def test_who_answered_a_ping_meanwhile_is_not_dead() -> None:
    with scene(TransportLimits(keepalive_timeout_s=SHORT_S)) as stopped, peer(stopped.server) as client:
        assert is_live(client)

        def answer() -> None:
            stopped.ping()
            assert client.read()

        stopped.stand_still(answer)
        assert is_live(client)


def test_who_greeted_meanwhile_is_no_stranger() -> None:
    with scene(TransportLimits(handshake_s=SHORT_S)) as stopped, Http2Peer(stopped.server.address) as client:
        stopped.until_one_is(lambda connection: not connection.session.greeted)
        stopped.stand_still(client.greet)
        assert is_live(client)


def test_who_said_nothing_is_still_given_up() -> None:
    with (
        scene(TransportLimits(handshake_s=SHORT_S)) as stopped,
        peer(stopped.server) as other,
        Http2Peer(stopped.server.address) as silent,
    ):
        assert is_live(other)
        stopped.until_one_is(lambda connection: not connection.session.greeted)
        stopped.stand_still(lambda: None)
        assert silent.is_closed_by_server()
        assert is_live(other)


def test_who_does_not_answer_a_ping_is_closed() -> None:
    limits = TransportLimits(keepalive_s=SHORT_S, keepalive_timeout_s=SHORT_S, sweep_s=0.01)
    with scene(limits) as stopped, peer(stopped.server) as dead, peer(stopped.server) as other:
        for client in (dead, other):
            assert is_live(client)
        stopped.stand_still(lambda: None)
        assert other.read()  # the ping
        assert is_live(other)
        stopped.stand_still(lambda: None)
        assert dead.is_closed_by_server()
        assert is_live(other)


def test_who_reads_slowly_is_not_closed(repository: Path) -> None:
    limits, size = TransportLimits(stall_s=SHORT_S, sweep_s=0.001), 500_000
    with (
        scene(limits, lambda: load_repository(repository)) as stopped,
        peer(stopped.server, {INITIAL_WINDOW_SIZE: 20_000}) as client,
    ):
        stream = client.call(frame(padded(size)))
        while len(client.body(stream)) < size:
            assert client.read()
            stopped.stand_still(lambda: None, SHORT_S / 2)
        assert client.status(stream) == (0, "")
