"""Requests that come after their answer, or more than that, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection

import pytest

from halfserve.serve.http.http_connection import EVENTS
from halfserve.serve.http.http_options import HttpLimits, HttpOptions
from halfserve.serve.http.rest_server import RestServer
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.http.running_http import running_http
from tests.serve.http.test_http_server import ended, limited
from tests.serve.http.test_inference import held_body, read_answer
from tests.serve.running_server import RunningServer, running_server
from tests.serve.standing_still import StandingLoop

HEAD = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS = 50 * EVENTS
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
LONG_S = 1000.0  # longer than all limits
INDEX = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
LARGE = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"


def send_on(peer: socket.socket) -> None:
    for _ in range(100_000):
        peer.sendall(bytes(100_000))


@pytest.mark.parametrize("rest", [b"a", b"abc"], ids=["unfinished", "finished"])
def test_a_connection_is_closed_if_its_body_follows_the_answer(server: RunningServer, rest: bytes) -> None:
    with limited(server, HttpLimits(keep_alive_s=0.3)) as address, socket.create_connection(address) as peer:
        peer.sendall(b"POST /v2/models/absent/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n")
        assert b"404" in read_answer(peer)
        peer.sendall(rest)
        assert ended(peer)


def test_a_refusal_during_a_body_is_answered(server: RunningServer) -> None:
    with limited(server, HttpLimits(max_body_bytes=1000)) as address:
        client = HTTPConnection(*address, timeout=HOLD_S)  # sends all before it looks at the answer
        with contextlib.closing(client):
            client.request("POST", "/v2/models/unbatched/infer", body=bytes(20_000_000))
            assert client.getresponse().status == 413


def test_a_refused_client_that_keeps_sending_is_cut_off(server: RunningServer) -> None:
    with (
        limited(server, HttpLimits(max_body_bytes=1000, stall_s=0.1)) as address,
        socket.create_connection(address, HOLD_S) as peer,
    ):
        peer.sendall(b"POST /v2/models/unbatched/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999999999\r\n\r\n")
        assert b" 413 " in read_answer(peer)
        with pytest.raises(ConnectionError):
            send_on(peer)


@pytest.mark.parametrize("before", [b"", LIVE, LIVE.replace(b"GET", b"HEAD")], ids=["first", "later", "after HEAD"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_request_that_hides_another_in_its_length_is_the_last(server: RunningServer, before: bytes, order: int) -> None:
    lengths = b"".join([b"content-length: 4\r\n", b"transfer-encoding: chunked\r\n"][::order])
    with limited(server, HttpLimits()) as address, socket.create_connection(address, HOLD_S) as peer:
        peer.sendall(before)
        assert not before or b" 200 " in read_answer(peer)
        smuggling = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\n" + lengths + b"\r\n0\r\n\r\n"
        peer.sendall(smuggling + b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        with peer.makefile("rb") as answers:
            said = answers.read()  # until the end
    assert said.startswith(b"HTTP/1.1 400")
    assert said.endswith(b'check its line, headers and lengths"}'), "and that is all"


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_what_comes_behind_the_last_request_costs_it_no_answer(version: bytes) -> None:
    backend = HeldBackend(held=True)
    body = json.dumps(held_body()).encode()
    with (
        running_server(lambda: [held_model(backend)]) as server,
        running_http(server) as rest,
        socket.create_connection(("127.0.0.1", rest.port)) as peer,
    ):
        head = b"POST /v2/models/held/infer %b\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        peer.sendall(head % (version, len(body)) + body)
        assert backend.entered.wait(HOLD_S)
        peer.sendall(b"\r\n")  # as some clients end a body
        server.call(lambda: None)
        backend.release.set()
        assert b'"data":[2.0]' in read_answer(peer)
        assert ended(peer)


def in_chunks(body: bytes) -> bytes:
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


BODY = in_chunks(json.dumps({"ready": True}).encode().ljust(CHUNKS))


class Looker:
    """Sees, each time that the event loop comes round, what has been received and not looked at."""

    def __init__(self, rest: RestServer) -> None:
        self.seen: set[int] = set()
        self._server = rest._servers[0]
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        self.seen.update(one._parser.buffered_bytes for one in self._server._open())
        self._handle = self._loop.call_soon(self._look)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.fixture
def rest(server: RunningServer) -> Iterator[RestServer]:
    with running_http(server, limits=HttpLimits()) as rest:
        yield rest


def test_others_have_their_turns_between_small_chunks(server: RunningServer, rest: RestServer) -> None:
    with socket.create_connection(("127.0.0.1", rest.port), HOLD_S) as peer:
        looker = server.call(lambda: Looker(rest))
        peer.sendall(HEAD + BODY)
        assert b" 200 " in read_answer(peer)
        server.call(looker.stop)
    assert len(looker.seen) > CHUNKS // EVENTS // 2


def test_a_connection_goes_on_after_many_chunks(rest: RestServer) -> None:
    with socket.create_connection(("127.0.0.1", rest.port), HOLD_S) as peer:
        for _ in range(2):
            peer.sendall(HEAD + BODY)
            assert b'"name"' in read_answer(peer)
        peer.sendall(HEAD + BODY + LIVE)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 2:  # both may come at once
            received = peer.recv(65536)
            assert received
            answers += received
        assert b'"name"' in answers


@pytest.mark.parametrize("rest_of_it", [b"no chunk\r\n", b"1\r\nab\r\n"], ids=["no size", "too long"])
def test_what_is_no_chunk_after_many_ends_the_connection(rest: RestServer, rest_of_it: bytes) -> None:
    with socket.create_connection(("127.0.0.1", rest.port), HOLD_S) as peer:
        peer.sendall(HEAD + BODY.removesuffix(b"0\r\n\r\n") + rest_of_it)
        assert b" 400 " in read_answer(peer)
        assert not peer.recv(1)


def test_a_refusal_amid_small_chunks_is_answered(rest: RestServer) -> None:
    with socket.create_connection(("127.0.0.1", rest.port), HOLD_S) as peer:
        peer.sendall(HEAD + in_chunks(bytes(2 * HttpLimits().max_small_body_bytes)))
        assert b" 413 " in read_answer(peer)


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
        return self._server.call(lambda: sum(one.writer.unread_bytes for one in self._connections))


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Has the limits of its parameter, or the default ones."""
    loop = StandingLoop()
    options = HttpOptions(port=0, metrics_port=None, limits=getattr(request, "param", HttpLimits()))
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


@pytest.mark.parametrize("scene", [HttpLimits(keep_alive_s=10 * LONG_S)], indirect=True, ids=[""])
def test_a_second_request_has_the_same_time_limit(scene: Scene) -> None:
    scene.peer.sendall(LIVE[:9])
    scene.stand_still(lambda: None)
    assert ended(scene.peer)


@pytest.mark.long
def test_a_client_that_reads_gets_its_other_answers(scene: Scene) -> None:
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
