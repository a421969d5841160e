from __future__ import annotations

import gc
import logging
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from starlette.responses import Response

from halfserve.serve.http.http_options import HttpLimits
from halfserve.serve.http.http_server import HttpServer
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.security import PortSecurity
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.transports import listener
from halfserve.serve.transports.listener import LOG_PERIOD_S, MAX_LOG_LINES, ConnectionLimit, LogThrottle
from halfserve.serve.transports.listening import Address, BindError, close, listen
from halfserve.serve.transports.nghttp2.connection import GrpcConnection
from halfserve.serve.transports.transport import Transport, TransportName, make_transport
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import WAIT_S, RunningServer, few_files, running_server
from tests.serve.security.guarded import Certificates, infer
from tests.serve.transports.nghttp2.http2_peer import Limited, serves

HELLO_BYTES = b"\x16\x03\x01\x02\x00"  # how a handshake of TLS begins
HTTP_1 = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@contextmanager
def serving(limit: ConnectionLimit, certificates: Certificates | None = None) -> Iterator[RunningServer]:
    def make(service: Service, host: str, port: int) -> Transport:
        guard = None if certificates is None else PortSecurity(tls=ServerTls(certificates.options))
        return make_transport(TransportName.NGHTTP2, service, host, port, guard, connections=limit)

    with running_server(lambda: [held_model(HeldBackend())], make) as server:
        yield server


def connected(server: RunningServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


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
        server.until(lambda: limit.open == 2)


def test_who_fails_at_tls_gives_the_place_back(certificates: Certificates) -> None:
    limit = ConnectionLimit()
    with serving(limit, certificates) as server:
        with connected(server) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert ended(stranger)
        server.until(lambda: limit.open == 0)


def test_an_unfinished_handshake_makes_no_connection(certificates: Certificates) -> None:
    limit = ConnectionLimit()

    def connections() -> int:
        return sum(type(one) is GrpcConnection for one in gc.get_objects())

    with serving(limit, certificates) as server, ExitStack() as stack:
        before = connections()
        for _ in range(3):
            stack.enter_context(connected(server)).sendall(HELLO_BYTES)
        server.until(lambda: limit.open == 3)
        assert connections() <= before


def test_a_connection_over_the_limit_is_unavailable_at_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Rather than at the call's deadline, as where it is told to go away: its client tries another server."""
    limit = ConnectionLimit(1, "there is room for 1")
    with serving(limit) as server:
        with connected(server):
            server.until(lambda: limit.open == 1)
            with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
                infer(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        server.until(lambda: limit.open == 0)
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(server.address, options) as channel:
            assert infer(channel) == 2
    assert "a connection was refused: 1 are open, and there is room for 1" in caplog.text


def test_all_ports_keep_to_one_limit() -> None:
    limit = ConnectionLimit(1)
    with serving(limit) as server:
        rest = server.call(lambda: HttpServer(Response(), "127.0.0.1", 0, limits=HttpLimits(), connections=limit))
        port = server.run(rest.start())
        try:
            with connected(server):
                server.until(lambda: limit.open == 1)
                with socket.create_connection(("127.0.0.1", port), WAIT_S) as peer:
                    assert peer.recv(1000).startswith(b"HTTP/1.1 503 ")
            server.until(lambda: limit.open == 0)
            with socket.create_connection(("127.0.0.1", port), WAIT_S):
                server.until(lambda: limit.open == 1)
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
            server.until(lambda: "connections cannot be accepted: Too many open files" in caplog.text)
        with peer:
            server.until(lambda: limit.open == 1)
    assert "Traceback" not in caplog.text


def test_a_free_port_is_found_and_connections_wait() -> None:
    (one,) = listen(Address("127.0.0.1", 0, "--grpc-port"))
    with one, socket.create_connection(one.getsockname(), timeout=60) as client:
        client.sendall(b"first")
        accepted, _ = one.accept()
        with accepted:
            assert accepted.recv(5) == b"first"
        assert not one.getblocking()


def test_all_addresses_of_a_name_get_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*found, found[0]])
    opened = listen(Address("both", 0, "--grpc-port"))
    names = [one.getsockname() for one in opened]
    close(opened)
    assert [host for host, _ in names] == ["127.0.0.1", "127.0.0.2"]
    assert len({port for _, port in names}) == 1


def test_addresses_that_this_machine_does_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("8.8.8.8", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (one,) = listen(Address("both", 0, "--grpc-port"))
    with one:
        assert one.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (Address("8.8.8.8", 0, "--http-port"), "8.8.8.8:0: Cannot assign requested address; choose another --http-port"),
        (Address("no.such.name.invalid", 1, "--grpc-port"), "cannot listen on no.such.name.invalid:1: "),
        (Address("a" * 70, 1, "--grpc-port"), "choose another --grpc-port (0 finds a free one) or --host"),
        (Address("", 0, "--admin-socket", Path("/no/such/folder/a")), "/no/such/folder/a: No such file or directory; choose"),
    ],
)
def test_what_cannot_be_listened_on_is_one_clear_line(address: Address, text: str) -> None:
    with pytest.raises(BindError) as refused:
        listen(address)
    assert text in str(refused.value)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            listen(Address("127.0.0.1", port, "--grpc-port"))


def test_a_unix_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    address = Address("", 0, "--admin-socket", tmp_path / "admin")
    (one,) = listen(address)
    with one:
        assert stat.S_IMODE((tmp_path / "admin").stat().st_mode) == 0o700
        with pytest.raises(BindError, match="admin: Address already in use; choose another --admin-socket path"):
            listen(address)


def test_the_first_lines_of_a_minute_are_written_and_the_others_counted() -> None:
    lines: list[str] = []
    now_s = [0.0]
    seldom = LogThrottle(lambda text, *values: lines.append(text % values), clock=lambda: now_s[0])
    for number in range(MAX_LOG_LINES + 7):
        seldom.say("line %d", number)
    assert lines == [f"line {number}" for number in range(MAX_LOG_LINES)]
    now_s[0] += LOG_PERIOD_S
    seldom.say("another")
    assert lines[MAX_LOG_LINES:] == ["7 lines like these were left out in the last 60 s", "another"]
    now_s[0] += LOG_PERIOD_S
    seldom.say("and one more")
    assert lines[MAX_LOG_LINES + 2 :] == ["and one more"]


def test_strangers_do_not_fill_the_log(limited: Limited, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server: RunningServer = limited()
    host, _, port = server.address.rpartition(":")
    for _ in range(3 * MAX_LOG_LINES):
        with socket.create_connection((host, int(port)), timeout=60) as stranger:
            stranger.sendall(HTTP_1)
            while stranger.recv(1000):
                pass
    assert sum("broke HTTP/2" in record.message for record in caplog.records) == MAX_LOG_LINES
    assert serves(server)


def test_opening_sockets_imports_no_event_loop() -> None:
    """The supervisor's process does no more than that, in 13 MB."""
    program = "import sys, halfserve.serve.transports.listening; print('asyncio' in sys.modules, 'ssl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False False\n"


def test_servers_share_a_port_only_where_both_say_so() -> None:
    (first,) = listen(Address("127.0.0.1", 0, "--grpc-port", is_shared=True))
    port = first.getsockname()[1]
    try:
        close(listen(Address("127.0.0.1", port, "--grpc-port", is_shared=True)))
        with pytest.raises(BindError, match="in use"):
            listen(Address("127.0.0.1", port, "--grpc-port"))
    finally:
        first.close()
