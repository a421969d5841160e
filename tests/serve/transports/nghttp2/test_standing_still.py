"""A process that stood still, as one that was stopped, reads what clients sent meanwhile before it gives up on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve.protocol.service import Service
from serve.transports.grpc_framing import frame
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.connection import GrpcConnection
from serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.standing_still import StandingLoop
from tests.serve.transports.nghttp2.calls import SERVER_LIVE
from tests.serve.transports.nghttp2.http2_peer import Http2Peer, call_headers, peer

SHORT_S, LONG_S = 10.0, 1000.0
EMPTY = frame(b"")


class Scene:
    """A server that can stand still."""

    def __init__(self, loop: StandingLoop, server: RunningServer, connections: set[GrpcConnection]) -> None:
        self.server = server
        self._loop = loop
        self._connections = connections

    def stand_still(self, meanwhile: Callable[[], object]) -> None:
        self.server.call(lambda: self._loop.stand_still(LONG_S, meanwhile))

    def until_one_is(self, such: Callable[[GrpcConnection], bool]) -> None:
        while not self.server.call(lambda: any(map(such, self._connections))):
            pass

    def ping(self) -> None:
        for connection in self._connections:
            connection.ping()


@contextmanager
def scene(limits: TransportLimits) -> Iterator[Scene]:
    loop = StandingLoop()
    made: list[Nghttp2Server] = []

    def make(service: Service, host: str, port: int) -> Nghttp2Server:
        made.append(Nghttp2Server(service, host, port, limits=limits))
        return made[0]

    with running_server(lambda: [held_model(HeldBackend())], make, make_loop=lambda: loop) as server:
        yield Scene(loop, server, made[0]._connections)


def is_live(client: Http2Peer) -> bool:
    stream = client.http2.send_request(call_headers(SERVER_LIVE))
    client.http2.send_data(stream, EMPTY, end_stream=True)
    client.push()
    return client.status(stream) == (0, "")


def test_a_message_whose_rest_came_meanwhile_is_answered() -> None:
    with scene(TransportLimits(stall_s=SHORT_S)) as stopped, peer(stopped.server) as client:
        stream = client.http2.send_request(call_headers(SERVER_LIVE))
        client.http2.send_data(stream, EMPTY[:1])
        client.push()
        stopped.until_one_is(lambda connection: connection.calls > 0)
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
        stopped.until_one_is(lambda connection: not connection.greeted)
        stopped.stand_still(client.greet)
        assert is_live(client)


def test_who_said_nothing_is_still_given_up() -> None:
    with scene(TransportLimits(handshake_s=SHORT_S)) as stopped, Http2Peer(stopped.server.address) as client:
        stopped.until_one_is(lambda connection: not connection.greeted)
        stopped.stand_still(lambda: None)
        assert client.is_closed_by_server()
