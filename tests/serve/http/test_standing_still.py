"""A process that stood still, as one that was stopped, reads what clients sent meanwhile before it gives up on them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from serve.http.options import HttpLimits, HttpOptions
from serve.http.rest_server import RestServer
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.http.running_http import running_http
from tests.serve.http.test_infer_route import read_answer
from tests.serve.running_server import RunningServer, running_server
from tests.serve.standing_still import StandingLoop

LONG_S = 1000.0  # longer than all limits
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
INDEX = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
LARGE = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Scene:
    """A connection to a server that can stand still."""

    def __init__(self, loop: StandingLoop, server: RunningServer, rest: RestServer, peer: socket.socket) -> None:
        self.peer = peer
        self._loop = loop
        self._server = server
        self._connections = rest._servers[0]._state.connections

    def stand_still(self, meanwhile: Callable[[], object]) -> None:
        self._server.call(lambda: None)  # it reads what has come before
        self._server.call(lambda: self._loop.stand_still(LONG_S, meanwhile))

    def unread(self) -> int:
        """Bytes that no socket takes."""
        return self._server.call(lambda: sum(one.transport.get_write_buffer_size() for one in self._connections))


@pytest.fixture
def scene() -> Iterator[Scene]:
    loop = StandingLoop()
    options = HttpOptions(port=0, metrics_port=None, limits=HttpLimits())
    with (
        running_server(lambda: [held_model(HeldBackend())], make_loop=lambda: loop) as server,
        running_http(server, options) as rest,
        socket.create_connection(("127.0.0.1", rest.port), HOLD_S) as peer,
    ):
        peer.sendall(LIVE)
        assert b" 200 " in read_answer(peer)
        yield Scene(loop, server, rest, peer)


@pytest.mark.parametrize("sent", [0, 9, len(INDEX) - 1], ids=["idle", "headers", "body"])
def test_a_request_that_came_meanwhile_is_answered(scene: Scene, sent: int) -> None:
    scene.peer.sendall(INDEX[:sent])
    scene.stand_still(lambda: scene.peer.sendall(INDEX[sent:]))
    assert scene.peer.recv(12) == b"HTTP/1.1 200"


def test_who_read_its_answers_meanwhile_gets_the_others(scene: Scene) -> None:
    wanted, came = 0, bytearray()
    while not scene.unread():
        scene.peer.sendall(LARGE)
        wanted += 1

    def read() -> None:
        scene.peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                came.extend(scene.peer.recv(1 << 20))

    scene.stand_still(read)
    scene.peer.settimeout(HOLD_S)
    while came.count(b"HTTP/1.1 200 ") < wanted or not came.endswith(b"}"):
        data = scene.peer.recv(1 << 20)
        assert data, "closed before all was read"
        came.extend(data)
