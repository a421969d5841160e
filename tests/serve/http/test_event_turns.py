"""Bodies in many small chunks: they are answered as others are, and others have their turns meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import h11
import pytest

from serve.http.event_turns import EVENTS, EventTurns
from serve.http.options import HttpLimits, HttpOptions
from serve.http.rest_server import RestServer
from tests.serve.engine.fakes import HOLD_S
from tests.serve.http.running_http import running_http
from tests.serve.http.test_infer_route import read_answer
from tests.serve.running_server import RunningServer

HEAD = b"POST /v2/repository/index HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS = 50 * EVENTS
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


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
        self.seen.update(len(one.conn.trailing_data[0]) for one in self._server._open())
        self._handle = self._loop.call_soon(self._look)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.fixture
def rest(server: RunningServer) -> Iterator[RestServer]:
    with running_http(server, HttpOptions(port=0, metrics_port=None, limits=HttpLimits())) as rest:
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
        while b'"live"' not in answers:  # both may come at once
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


def test_who_is_refused_amid_small_chunks_hears_why(rest: RestServer) -> None:
    with socket.create_connection(("127.0.0.1", rest.port), HOLD_S) as peer:
        peer.sendall(HEAD + in_chunks(bytes(2 * HttpLimits().max_small_body_bytes)))
        assert b" 413 " in read_answer(peer)


def test_a_turn_has_so_many_events() -> None:
    connection = EventTurns(h11.SERVER)
    connection.receive_data(HEAD + BODY)
    events = [connection.next_event() for _ in range(EVENTS)]
    assert h11.NEED_DATA not in events
    assert (connection.next_event(), connection.has_more) == (h11.NEED_DATA, True)
    connection.begin_turn()
    assert isinstance(connection.next_event(), h11.Data)
    assert not connection.has_more
