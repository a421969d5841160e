"""Requests that come after their answer, or more than that, over a real socket."""

from __future__ import annotations

import contextlib
import json
import socket
from http.client import HTTPConnection

import pytest

from serve.http.options import HttpLimits, HttpOptions
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.http.running_http import running_http
from tests.serve.http.test_http_server import ended, limited
from tests.serve.http.test_infer_route import held_body, read_answer
from tests.serve.running_server import RunningServer, running_server


def send_on(peer: socket.socket) -> None:
    for _ in range(100_000):
        peer.sendall(bytes(100_000))


@pytest.mark.parametrize("rest", [b"a", b"abc"], ids=["unfinished", "finished"])
def test_a_connection_is_closed_whose_body_came_after_the_answer(server: RunningServer, rest: bytes) -> None:
    with limited(server, HttpLimits(keep_alive_s=0.3)) as address, socket.create_connection(address) as peer:
        peer.sendall(b"POST /v2/models/absent/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n")
        assert b"404" in read_answer(peer)
        peer.sendall(rest)
        assert ended(peer)


def test_who_is_refused_while_it_sends_hears_why(server: RunningServer) -> None:
    with limited(server, HttpLimits(max_body_bytes=1000)) as address:
        client = HTTPConnection(*address, timeout=HOLD_S)  # sends all before it looks at the answer
        with contextlib.closing(client):
            client.request("POST", "/v2/models/unbatched/infer", body=bytes(20_000_000))
            assert client.getresponse().status == 413


def test_who_goes_on_sending_is_cut_off(server: RunningServer) -> None:
    with (
        limited(server, HttpLimits(max_body_bytes=1000, stall_s=0.1)) as address,
        socket.create_connection(address, HOLD_S) as peer,
    ):
        peer.sendall(b"POST /v2/models/unbatched/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999999999\r\n\r\n")
        assert b" 413 " in read_answer(peer)
        with pytest.raises(ConnectionError):
            send_on(peer)


@pytest.mark.parametrize("before", [b"", b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["first", "later"])
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
        running_http(server, HttpOptions(port=0, metrics_port=None)) as rest,
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
