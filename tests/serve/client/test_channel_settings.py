"""How calls reach a server: addresses, certificates, tokens, metadata, compression, replicas, threads, forks, restarts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme

from halfserve import (
    AccessDenied,
    Client,
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RetryPolicy,
    ServerUnavailable,
    Tls,
)
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.channel_settings import GRPC_ROOTS, bearer, headers_of, parse_address
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import Failure, ScriptedServer
from tests.serve.running_server import RunningServer

TOKEN = "t0ken"  # noqa: S105  (opens nothing)
LIVE: dict[str, list[Any]] = {"ServerLive": [pb.ServerLiveResponse(live=True)]}
NAME: dict[str, list[Any]] = {"ServerMetadata": [pb.ServerMetadataResponse(name="s")]}


@pytest.mark.parametrize(
    ("address", "uri", "is_local"),
    [
        ("127.0.0.1:8001", "127.0.0.1:8001", True),
        ("localhost:1", "localhost:1", True),
        ("[::1]:8001", "[::1]:8001", True),
        ("models.example:8001", "models.example:8001", False),
        ("10.0.0.1:8001", "10.0.0.1:8001", False),
        ("unix:/run/h.sock", "unix:/run/h.sock", True),
        (["10.0.0.1:1"], "10.0.0.1:1", False),
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2", False),
        (["localhost:1", "127.0.0.2:2"], "ipv4:127.0.0.1:1,127.0.0.2:2", True),
        (["[::1]:1", "[fd00::1]:2"], "ipv6:[::1]:1,[fd00::1]:2", False),
    ],
)
def test_addresses_are_parsed(address: str | Sequence[str], uri: str, is_local: bool) -> None:
    target = parse_address(address)
    assert (target.uri, target.is_local) == (uri, is_local)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ([], "must be HOST:PORT, at least one of them"),
        (["a.example:1", "10.0.0.1:1"], "'a.example:1' among several addresses must be IP:PORT; or give one name"),
        (["[::1]:1", "10.0.0.1:1"], "must be all IPv4 or all IPv6, not both"),
        (["10.0.0.1:1", "10.0.0.2"], "must be HOST:PORT, such as 127.0.0.1:8001, not '10.0.0.2'"),
        ("grpc://h:1", "must be HOST:PORT"),
        ("h:²", "must be HOST:PORT"),
        *((address, "must be HOST:PORT") for address in ("localhost", "http://localhost:8001", "localhost:70000", ":8001")),
        ("::1:8001", r"an IPv6 address needs brackets, such as \[::1\]:8001, not '::1:8001'"),
        ("\udcff:1", r"the address must be text that UTF-8 can encode, not '\\udcff:1'"),
        (["\udcff:1", "h:1"], r"the address must be text that UTF-8 can encode, not '\\udcff:1'"),
        ("unix:/\udcff", r"the address must be text that UTF-8 can encode, not 'unix:/\\udcff'"),
    ],
)
def test_malformed_addresses_are_refused(address: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        parse_address(address)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("a b", "v", "expected a name of a-z"),
        ("", "v", "expected a name of a-z"),
        ("grpc-timeout", "1S", "that does not begin with grpc-"),
        ("a", b"v", "bytes need a name that ends in -bin"),
        ("a-bin", "v", "bytes need a name that ends in -bin"),
        ("a", "é", "expected printable ASCII text"),
        ("a", "b\nc", "expected printable ASCII text"),
        ("a", 3, "expected printable ASCII text"),
    ],
)
def test_headers_that_grpc_cannot_send_are_refused(name: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        headers_of({name: value})


@pytest.mark.parametrize("token", ["", "secret\n", "a b", "é"])
def test_malformed_tokens_are_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidRequest, match="must be printable ASCII without spaces") as refused:
        bearer(token)
    assert not token.strip() or token.strip() not in str(refused.value)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of an authority, of a client's certificate and key that it signed, and of a server's."""
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "stranger.pem"))
    (folder / "no.pem").write_text("hello")
    for who, identity in (("server", "localhost"), ("client", "me@example.org")):
        issued = authority.issue_cert(identity)
        issued.private_key_pem.write_to_path(str(folder / f"{who}.key"))
        (folder / f"{who}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return lambda name: folder / name


@pytest.fixture
def secure(certificates: Callable[[str], Path]) -> Iterator[ScriptedServer]:
    """A server that asks for the client's certificate."""
    pair = (certificates("server.key").read_bytes(), certificates("server.pem").read_bytes())
    authority = certificates("authority.pem").read_bytes()
    server = ScriptedServer(grpc.ssl_server_credentials([pair], authority, require_client_auth=True))
    server.answers |= NAME
    yield server
    server.stop()


def test_both_sides_show_their_certificates(
    secure: ScriptedServer, connect: Connect, certificates: Callable[[str], Path]
) -> None:
    tls = Tls(
        authorities=certificates("authority.pem"),
        certificate=certificates("client.pem"),
        key=certificates("client.key"),
        server_name="localhost",
    )
    assert connect(secure.address, tls=tls, token=TOKEN).server_metadata().name == "s"
    assert secure.headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", GRPC_ROOTS])
def test_the_systems_authorities_are_trusted(certificates: Callable[[str], Path], variable: str) -> None:
    pair = (certificates("server.key").read_bytes(), certificates("server.pem").read_bytes())
    server = ScriptedServer(grpc.ssl_server_credentials([pair]))
    server.answers |= NAME
    # Another process: gRPC reads its own variable once.
    program = f"""
from halfserve import Client, Tls
print(Client("{server.address}", tls=Tls(server_name="localhost"), timeout_s=60).server_metadata().name)
"""
    environment = {name: value for name, value in os.environ.items() if name not in {"SSL_CERT_FILE", GRPC_ROOTS}}
    environment[variable] = str(certificates("authority.pem"))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    server.stop()
    assert (done.stdout, done.stderr) == ("s\n", "")


@pytest.mark.parametrize(
    ("files", "server_name", "text"),
    [
        ({"authorities": "stranger.pem"}, "localhost", "is not signed by an authority that this client trusts"),
        ({"authorities": "authority.pem"}, "example.org", "was made for another name; give the name that stands in it"),
    ],
)
def test_an_untrusted_server_is_refused(
    secure: ScriptedServer,
    connect: Connect,
    certificates: Callable[[str], Path],
    files: dict[str, str],
    server_name: str,
    text: str,
) -> None:
    tls = Tls(**{name: certificates(file) for name, file in files.items()}, server_name=server_name)
    with pytest.raises(ServerUnavailable, match=text):
        connect(secure.address, tls=tls, retries=0).server_metadata()


def test_a_server_that_does_not_greet_at_once_is_waited_for(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as restarting:  # where connections wait for the next worker
        address = f"127.0.0.1:{restarting.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match="did not answer ServerMetadata within 1.5 s"):
            connect(address, timeout_s=1.5, retries=0).server_metadata()


def test_tls_to_a_server_without_it(scripted: ScriptedServer, connect: Connect, certificates: Callable[[str], Path]) -> None:
    with pytest.raises(ServerUnavailable, match="does not speak TLS; connect without it"):
        connect(scripted.address, tls=Tls(authorities=certificates("authority.pem"))).server_metadata()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"authorities": "missing.pem"}, "TLS authorities: .*missing.pem cannot be read: No such file or directory"),
        ({"certificate": "client.pem"}, "TLS has a client certificate without its key; give both files"),
        ({"key": "client.key"}, "TLS has a client key without its certificate"),
        ({"authorities": "../"}, "cannot be read: Is a directory"),
        ({"authorities": "no.pem"}, "no.pem is no PEM file; expected a line that begins with -----BEGIN"),
    ],
)
def test_incomplete_certificates_are_refused(certificates: Callable[[str], Path], files: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        Tls(**{name: certificates(file) for name, file in files.items()})  # type: ignore[arg-type]  # (never server_name)


def test_metadata_and_token_go_with_each_call(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.answers["ModelInfer"] = [pb.ModelInferResponse()]
    tokens = iter(["first", "renewed"])
    client = connect(scripted.address, metadata={"X-Tenant": "a"}, token=lambda: next(tokens))
    for token in ("first", "renewed"):
        client.infer_message(pb.ModelInferRequest(), metadata={"trace-bin": b"\1"})
        sent = [scripted.headers[name] for name in ("x-tenant", "trace-bin", "authorization")]
        assert sent == ["a", b"\1", f"Bearer {token}"]


def test_a_token_stays_on_this_machine_or_goes_encrypted(connect: Connect) -> None:
    with pytest.raises(InvalidRequest, match="a token would go unencrypted to example.org:8001, .*; encrypt with tls= "):
        connect("example.org:8001", token=TOKEN)


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED"])
def test_refused_credentials_are_access_denied(scripted: ScriptedServer, connect: Connect, code: str) -> None:
    scripted.answers["ServerMetadata"] = [Failure(code, "who are you?")]
    with pytest.raises(AccessDenied, match="who are you") as denied:
        connect(scripted.address).server_metadata()
    assert denied.value.code == code


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compressed_requests(server: RunningServer, connect: Connect, compression: Any) -> None:
    x = np.zeros((4, 64), np.float16)
    expected = connect(server.address).infer("mlp", {"x": x})["y"]
    np.testing.assert_array_equal(connect(server.address, compression=compression).infer("mlp", {"x": x})["y"], expected)
    np.testing.assert_array_equal(connect(server.address).infer("mlp", {"x": x}, compression=compression)["y"], expected)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "zstd"}, "compression must be one of gzip, deflate or None, not 'zstd'"),
        ({"keepalive_s": 0}, "keepalive_s must be seconds above 0"),
        ({"balancing": "random"}, "balancing must be one of pick_first, round_robin, not 'random'"),
        ({"retries": 1.5}, "retries must be 0 to 10, not 1.5"),
        ({"retries": 11}, "retries must be 0 to 10"),
        *(({"timeout_s": wrong}, "timeout_s must be seconds above 0") for wrong in (0, float("nan"))),
    ],
)
def test_unknown_options_are_refused(connect: Connect, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        connect("127.0.0.1:1", **options)


def test_round_robin_asks_all_servers(scripted: ScriptedServer, connect: Connect) -> None:
    other = ScriptedServer()
    try:
        for one in (scripted, other):
            one.answers |= LIVE
        client = connect([scripted.address, other.address], balancing="round_robin", keepalive_s=600)
        while not (scripted.count("ServerLive") and other.count("ServerLive")):  # one connection may take longer
            assert client.is_live()
    finally:
        other.stop()


def test_a_dead_first_server_is_passed_over(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.answers |= LIVE
    assert connect(["127.0.0.1:1", scripted.address]).is_live()


def test_a_socket_file(tmp_path: Path, connect: Connect) -> None:
    with pytest.raises(ServerUnavailable, match=r"no server answers at unix:.*\(no such file\)"):
        connect(f"unix:{tmp_path}/none.sock").server_metadata()


def test_many_threads_share_a_client(server: RunningServer) -> None:
    x = np.random.default_rng(2).standard_normal((16, 64)).astype(np.float16)
    together = threading.Barrier(16)
    with Client(server.address) as client, ThreadPoolExecutor(16) as threads:

        def ask(row: int) -> list[Any]:
            together.wait(60)
            return [client.infer("mlp", {"x": x[row : row + 1]})["y"][0] for _ in range(10)]

        answers = list(threads.map(ask, range(16)))
        expected = client.infer("mlp", {"x": x})["y"]
    for row, own in enumerate(answers):
        np.testing.assert_allclose(own, np.broadcast_to(expected[row], (10, 10)), atol=2e-3)


def test_closing_while_others_ask(scripted: ScriptedServer) -> None:
    scripted.answers["ModelInfer"] = [pb.ModelInferResponse()]
    scripted.held.add("ModelInfer")
    client = Client(scripted.address)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.infer_message, pb.ModelInferRequest())
        assert scripted.arrived.wait(60)
        client.close()
        with pytest.raises(ClientError, match="was cancelled before .* answered") as closed:
            asked.result(60)
    assert closed.value.code == "CANCELLED"


def test_a_client_refuses_calls_after_a_fork(
    scripted: ScriptedServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.answers |= LIVE
    client = connect(scripted.address)
    assert client.is_live()
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(ClientError, match="has connected in another process; gRPC does not survive a fork"):
        client.server_metadata()


@pytest.mark.parametrize("hint", [(), (("grpc-retry-pushback-ms", "-1"),)])
def test_an_overload_without_a_hint_is_not_made_worse(scripted: ScriptedServer, connect: Connect, hint: Any) -> None:
    scripted.answers["ServerMetadata"] = [Failure("RESOURCE_EXHAUSTED", "full", hint)]
    with pytest.raises(Overloaded, match="full"):
        connect(scripted.address, retries=5).server_metadata()
    assert scripted.count("ServerMetadata") == 1


def test_calls_that_are_not_idempotent_are_not_repeated(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.serve_model()
    scripted.answers["ModelInfer"] = [Failure("UNAVAILABLE", "lost half-way")]
    policy = RetryPolicy(retries=1, initial_backoff_s=0.001, max_backoff_s=0.001)
    client = connect(scripted.address, retries=policy)
    for idempotent, calls in ((False, 1), (True, 2)):
        before = scripted.count("ModelInfer")
        with pytest.raises(ServerUnavailable, match="lost half-way"):
            client.infer("m", {"x": [[1, 2]]}, idempotent=idempotent)
        assert scripted.count("ModelInfer") - before == calls


@pytest.mark.parametrize("balancing", ["pick_first", "round_robin"])
def test_a_restarted_server_is_found(connect: Connect, free_port: int, balancing: str) -> None:
    first = ScriptedServer(port=free_port)
    first.answers |= NAME
    policy = RetryPolicy(retries=0, initial_backoff_s=0.01, max_backoff_s=0.01, wait_for_server=True)
    client = connect(first.address, retries=policy, balancing=balancing)
    assert client.server_metadata().name == "s"
    first.stop()
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(ScriptedServer, port=free_port, answers=NAME)
        try:
            assert client.server_metadata().name == "s"
        finally:
            starting.result(60).stop()
