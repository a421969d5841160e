"""Connections that are more than there is room for, and such as never begin."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from serve.http.http_server import HttpServer
from serve.http.options import HttpLimits
from serve.protocol.service import Service
from serve.security.security import Guard
from serve.security.tls import Tls
from serve.transports import listener
from serve.transports.choice import TransportName, make_transport
from serve.transports.listener import ConnectionLimit
from serve.transports.transport import Transport
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server
from tests.serve.security.guarded import Certificates, infer
from tests.serve.transports.nghttp2.http2_peer import WAIT_S

HELLO_BYTES = b"\x16\x03\x01\x02\x00"  # how a handshake of TLS begins


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@contextmanager
def serving(limit: ConnectionLimit, certificates: Certificates | None = None) -> Iterator[RunningServer]:
    def make(service: Service, host: str, port: int) -> Transport:
        guard = None if certificates is None else Guard(tls=Tls(certificates.options))
        return make_transport(TransportName.NGHTTP2, service, host, port, guard, connections=limit)

    with running_server(lambda: [held_model(HeldBackend())], make) as server:
        yield server


def connected(server: RunningServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def until_open(server: RunningServer, limit: ConnectionLimit, count: int) -> None:
    for _ in range(100_000):  # turns of its loop
        if server.call(lambda: limit.open) == count:
            return
    raise AssertionError(f"{limit.open} are open, expected {count}")


def ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


@contextmanager
def few_files(spare: int) -> Iterator[None]:
    """This process can open so many files more."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


@pytest.mark.parametrize("words", [b"", HELLO_BYTES])
def test_who_does_not_finish_tls_gives_way_to_who_does(certificates: Certificates, words: bytes) -> None:
    limit = ConnectionLimit(3)
    with serving(limit, certificates) as server, ExitStack() as stack:
        half_open = [stack.enter_context(connected(server)) for _ in range(8)]
        for one in half_open:
            one.sendall(words)
        credentials = grpc.ssl_channel_credentials(certificates.trusted)
        with grpc.secure_channel(f"localhost:{server.address.rpartition(':')[2]}", credentials) as channel:
            assert infer(channel) == 2
            assert all(ended(one) for one in half_open[:5])
            assert server.call(lambda: limit.open) <= 3


def test_handshakes_are_bounded(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take memory, and a client needs none for its side."""
    monkeypatch.setattr(listener, "MAX_HANDSHAKES", 2)
    limit = ConnectionLimit()
    with serving(limit, certificates) as server, ExitStack() as stack:
        half_open = [stack.enter_context(connected(server)) for _ in range(5)]
        assert all(ended(one) for one in half_open[:3])
        until_open(server, limit, 2)


def test_who_fails_at_tls_gives_the_place_back(certificates: Certificates) -> None:
    limit = ConnectionLimit()
    with serving(limit, certificates) as server:
        with connected(server) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert ended(stranger)
        until_open(server, limit, 0)


def test_a_connection_over_the_limit_is_unavailable_at_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Rather than at the call's deadline, as where it is told to go away: its client tries another server."""
    limit = ConnectionLimit(1, "there is room for 1")
    with serving(limit) as server:
        with connected(server):
            until_open(server, limit, 1)
            with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
                infer(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        until_open(server, limit, 0)
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(server.address, options) as channel:
            assert infer(channel) == 2
    assert "a connection was refused: 1 are open, and there is room for 1" in caplog.text


def test_all_ports_keep_to_one_limit() -> None:
    limit = ConnectionLimit(1)
    with serving(limit) as server:
        rest = server.call(lambda: HttpServer(None, "127.0.0.1", 0, limits=HttpLimits(), connections=limit))
        port = server.run(rest.start())
        try:
            with connected(server):
                until_open(server, limit, 1)
                with socket.create_connection(("127.0.0.1", port), WAIT_S) as peer:
                    assert peer.recv(1000).startswith(b"HTTP/1.1 503 ")
            until_open(server, limit, 0)
            with socket.create_connection(("127.0.0.1", port), WAIT_S):
                until_open(server, limit, 1)
        finally:
            server.run(rest.stop(0.1))


def test_connections_wait_while_the_system_has_no_file_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "REST_S", 0.01)
    limit = ConnectionLimit()
    with serving(limit) as server:
        with few_files(1):
            peer = connected(server)
            for _ in range(100_000):
                if "connections cannot be accepted: Too many open files" in caplog.text:
                    break
                server.call(lambda: None)
        with peer:
            until_open(server, limit, 1)
    assert "Traceback" not in caplog.text
    assert "connections cannot be accepted: Too many open files" in caplog.text
