from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from serve.transports.listening import Address, close, listen
from serve.transports.transport import BindError


def test_a_free_port_is_found_and_connections_wait() -> None:
    (one,) = listen(Address("127.0.0.1", 0, "--grpc-port"))
    with one, socket.create_connection(one.getsockname(), timeout=10) as client:
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
