"""Tokens, roles, limits and the admin port on real connections, over both transports."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as SystemMemory
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions
from halfserve.serve.protocol.rpc import UNKNOWN_METHOD, Role
from halfserve.serve.protocol.service import INFER_PATH, INFER_STREAM_PATH, SERVICE
from halfserve.serve.security.private_socket import private_socket
from halfserve.serve.security.security_options import ClientLimits, SecurityOptions
from halfserve.serve.security.tokens import NO_TOKEN
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.listening import BindError
from halfserve.serve.transports.transport import TransportName
from tests.serve.engine.fakes import HeldBackend
from tests.serve.running_server import WAIT_S, RunningServer
from tests.serve.security.guarded import WATCH_S, bearer, call, guarded_server, infer, infer_request, tokens_in
from tests.serve.transports.nghttp2.http2_peer import call_headers, peer

HEALTH = "/grpc.health.v1.Health/Check"
LOAD = pb.RepositoryModelLoadRequest(model_name="held").SerializeToString()
PERMISSION_DENIED, UNAUTHENTICATED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


class Asked:
    """A server that asks for tokens, and theirs."""

    def __init__(self, server: RunningServer, channel: grpc.Channel, tokens: dict[str, str], path: Path) -> None:
        self.server, self.channel, self.tokens, self.path = server, channel, tokens, path

    def refused(self, method: str, message: bytes = b"", who: str | None = None) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refused:
            call(self.channel, method, message, None if who is None else bearer(self.tokens[who]))
        return refused.value.code(), refused.value.details()


@pytest.fixture
def asked(tmp_path: Path, transport: TransportName) -> Iterator[Asked]:
    path = tmp_path / "tokens"
    tokens = tokens_in(path, alice=Role.INFER, sharer=Role.SHARED_MEMORY, scraper=Role.METRICS, root=Role.ADMIN)
    options = SecurityOptions(token_file=path, watch_s=WATCH_S)
    with (
        guarded_server(options, transport, shared_memory=True) as (server, _),
        grpc.insecure_channel(server.address) as channel,
    ):
        yield Asked(server, channel, tokens, path)


def test_calls_without_a_token_are_refused_except_health(asked: Asked) -> None:
    for method, message in ((INFER_PATH, infer_request()), ("ModelMetadata", b""), ("RepositoryIndex", b"")):
        assert asked.refused(method, message) == (
            UNAUTHENTICATED,
            NO_TOKEN,
        )
    for method in ("ServerLive", "ServerReady", HEALTH):
        assert call(asked.channel, method)
    with pytest.raises(grpc.RpcError, match="the token is not valid here"):
        infer(asked.channel, bearer("hs_" + "x" * 43))
    assert infer(asked.channel, bearer(asked.tokens["alice"])) == 2
    assert asked.server.call(lambda: asked.server.core.figures.refused) == {"unauthenticated": 4}


@pytest.mark.parametrize("method", [INFER_PATH, "ServerMetadata", HEALTH])
def test_a_call_with_two_tokens_is_refused(asked: Asked, method: str) -> None:
    """Which of them counts would differ from one who looks to the next."""
    alice, root = bearer(asked.tokens["alice"]), bearer(asked.tokens["root"])
    message = infer_request() if method == INFER_PATH else b""
    for several in (alice + root, root + alice, alice + bearer("hs_" + "x" * 43), alice + alice, alice + alice):
        with pytest.raises(grpc.RpcError, match="the call has several 'authorization' headers, expected one: send") as refused:
            call(asked.channel, method, message, several)
        assert refused.value.code() is UNAUTHENTICATED
        assert call(asked.channel, method, message, alice)


def test_a_token_does_what_its_roles_allow(asked: Asked) -> None:
    assert asked.refused("RepositoryModelLoad", LOAD, "alice") == (
        PERMISSION_DENIED,
        "the token may not do this: it requires the role 'admin'",
    )
    for method in ("RepositoryModelUnload", "LogSettings", "TraceSetting", "SystemSharedMemoryStatus", "/any.Other/Method"):
        assert asked.refused(method, who="alice")[0] is PERMISSION_DENIED
    assert asked.refused(INFER_PATH, infer_request(), "scraper")[0] is PERMISSION_DENIED
    call(asked.channel, "LogSettings", metadata=bearer(asked.tokens["root"]))
    assert infer(asked.channel, bearer(asked.tokens["root"])) == 2
    assert asked.refused("/any.Other/Method", who="root") == (
        grpc.StatusCode.UNIMPLEMENTED,
        "/any.Other/Method is not served here; server reflection lists what is",
    )


def infer_until_refused(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> None:
    while infer(channel, metadata) == 2:
        pass


def test_a_revoked_token_is_refused_on_a_connection_that_it_has_used(asked: Asked) -> None:
    alice, metadata = asked.tokens["alice"], bearer(asked.tokens["alice"])
    assert infer(asked.channel, metadata) == 2
    kept = [line for line in asked.path.read_text().splitlines() if not line.startswith("alice")]
    asked.path.write_text("\n".join(kept))
    with pytest.raises(grpc.RpcError, match="the token is not valid here") as refused:
        infer_until_refused(asked.channel, metadata)
    assert refused.value.code() is UNAUTHENTICATED
    assert alice not in refused.value.details()
    assert infer(asked.channel, bearer(asked.tokens["root"])) == 2


def test_what_a_connection_remembers_of_a_token_is_forgotten(tmp_path: Path) -> None:
    alice = tokens_in(tmp_path / "tokens", alice=Role.INFER)["alice"]
    options = SecurityOptions(token_file=tmp_path / "tokens", watch_s=WATCH_S)
    headers = call_headers(f"/{SERVICE}/ServerMetadata".encode(), authorization=f"Bearer {alice}".encode())
    with guarded_server(options) as (server, _), peer(server) as client:

        def status() -> int:
            stream = client.http2.send_request(headers)
            client.http2.send_data(stream, frame(b""), end_stream=True)
            client.push()
            return client.status(stream)[0]

        assert [status(), status()] == [0, 0]
        tokens_in(tmp_path / "tokens", alice=Role.INFER)
        while (code := status()) == 0:
            pass
        assert code == UNAUTHENTICATED.value[0]


def test_a_stream_that_is_open_ends_to_be_served_with_its_token(asked: Asked) -> None:
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    open_stream = asked.channel.stream_stream(INFER_STREAM_PATH)
    answers = open_stream(iter(requests.get, None), metadata=bearer(asked.tokens["alice"]), timeout=WAIT_S)

    def told() -> str:
        requests.put(infer_request())
        return str(pb.ModelStreamInferResponse.FromString(next(answers)).error_message)

    assert told() == ""
    tokens_in(asked.path, root=Role.ADMIN)
    while not (text := told()):
        pass
    assert text.startswith("the token is not valid here")
    requests.put(None)
    assert list(answers) == []


def test_another_clients_shared_memory_cannot_be_named_without_the_role(asked: Asked) -> None:
    memory = SystemMemory(create=True, size=4)
    try:
        register = pb.SystemSharedMemoryRegisterRequest(name="secret", key=memory.name, byte_size=4).SerializeToString()
        assert asked.refused("SystemSharedMemoryRegister", register, "alice")[0] is PERMISSION_DENIED
        call(asked.channel, "SystemSharedMemoryRegister", register, bearer(asked.tokens["root"]))
        request = pb.ModelInferRequest(model_name="held")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        request.inputs[0].parameters["shared_memory_region"].string_param = "secret"
        request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4
        message = request.SerializeToString()
        assert asked.refused(INFER_PATH, message, "alice") == (
            PERMISSION_DENIED,
            "the token may not use shared memory: it requires the role 'shared-memory'",
        )
        assert call(asked.channel, INFER_PATH, message, bearer(asked.tokens["root"]))
        request.id = "x" * 400_000  # such a request comes in pieces
        for _ in range(3):
            assert asked.refused(INFER_PATH, request.SerializeToString(), "alice")[0] is PERMISSION_DENIED
        # The same words within a tensor are none of the gate's business.
        innocent = pb.ModelInferRequest(model_name="held", id="shared_memory_region")
        innocent.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        innocent.raw_input_contents.append(b"\0\0\0\0")
        assert call(asked.channel, INFER_PATH, innocent.SerializeToString(), bearer(asked.tokens["alice"]))
    finally:
        memory.close()
        memory.unlink()


def test_no_token_is_needed_without_a_token_file(transport: TransportName) -> None:
    with guarded_server(SecurityOptions(), transport) as (server, security):
        assert security.main.gate is None
        with grpc.insecure_channel(server.address) as channel:
            assert infer(channel, bearer("whatever")) == 2


def test_what_changes_the_server_is_refused_on_the_main_port(transport: TransportName) -> None:
    options = SecurityOptions(admin_port=0)
    with guarded_server(options, transport) as (server, _), grpc.insecure_channel(server.address) as channel:
        for method in ("RepositoryModelLoad", "RepositoryModelUnload", "LogSettings", "TraceSetting"):
            with pytest.raises(grpc.RpcError, match="are not served on this port; use its admin port or socket") as refused:
                call(channel, method)
            assert refused.value.code() is PERMISSION_DENIED
        assert infer(channel) == 2


def test_the_admin_port_serves_it_to_administrators(tmp_path: Path, transport: TransportName) -> None:
    tokens = tokens_in(tmp_path / "tokens", alice=Role.INFER, root=Role.ADMIN)
    options = SecurityOptions(admin_port=0, token_file=tmp_path / "tokens")
    with guarded_server(options, transport, at_admin=True) as (server, _), grpc.insecure_channel(server.address) as channel:
        call(channel, "LogSettings", metadata=bearer(tokens["root"]))
        with pytest.raises(grpc.RpcError, match="it requires the role 'admin'"):
            call(channel, "LogSettings", metadata=bearer(tokens["alice"]))


def test_the_admin_socket_is_the_servers_own_users(tmp_path: Path, transport: TransportName) -> None:
    path = tmp_path / "admin.sock"
    options = SecurityOptions(admin_socket=path)
    with guarded_server(options, transport, at_admin=True), grpc.insecure_channel(f"unix:{path}") as channel:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        call(channel, "LogSettings")
    assert not path.exists()


def test_a_socket_that_a_server_left_behind_gives_way_and_others_do_not(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    options = SecurityOptions(admin_socket=path)
    with guarded_server(options, at_admin=True):
        os.link(path, tmp_path / "left")
        with pytest.raises(BindError, match="Address already in use; choose another --admin-socket path"):
            guarded_server(options, at_admin=True).__enter__()
    (tmp_path / "left").rename(path)
    with guarded_server(options, at_admin=True), grpc.insecure_channel(f"unix:{path}") as channel:
        call(channel, "LogSettings")
    path.write_text("precious")
    with pytest.raises(BindError, match="cannot listen on"):
        guarded_server(options, at_admin=True).__enter__()
    assert path.read_text() == "precious"


def trailers_of(refused: Any) -> dict[str, str]:
    return dict(refused.value.trailing_metadata())


def test_other_files_that_a_server_makes_are_as_open_as_before(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    private_socket(tmp_path / "socket").close()
    (tmp_path / "after").touch()
    assert (tmp_path / "after").stat().st_mode == (tmp_path / "before").stat().st_mode
    assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) & 0o077 == 0


def test_one_client_may_not_send_more_than_its_rate(tmp_path: Path, transport: TransportName) -> None:
    tokens = tokens_in(tmp_path / "tokens", alice=Role.INFER, bob=Role.INFER)
    limits = ClientLimits(requests_per_s=0.001, burst=2)
    options = SecurityOptions(token_file=tmp_path / "tokens", client_limits=limits)
    with guarded_server(options, transport) as (server, _), grpc.insecure_channel(server.address) as channel:
        infer(channel, bearer(tokens["alice"]))
        call(channel, "ServerMetadata", metadata=bearer(tokens["alice"]))
        for method, message in ((INFER_PATH, infer_request()), ("ServerMetadata", b""), ("RepositoryIndex", b"")):
            with pytest.raises(
                grpc.RpcError, match=r"this client may send 0\.001 requests a second; send the next in"
            ) as refused:
                call(channel, method, message, bearer(tokens["alice"]))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 0 < int(trailers_of(refused)["grpc-retry-pushback-ms"]) <= 1_000_000
        assert infer(channel, bearer(tokens["bob"])) == 2
        assert call(channel, "ServerLive", metadata=bearer(tokens["alice"]))
        assert server.call(lambda: server.core.figures.refused) == {"rate_limited": 3}


def test_one_address_may_not_hold_more_places_than_its_own(transport: TransportName) -> None:
    backend = HeldBackend(held=True)
    options = SecurityOptions(client_limits=ClientLimits(max_concurrent=1))
    with (
        guarded_server(options, transport, backend=backend) as (server, _),
        grpc.insecure_channel(server.address) as channel,
    ):
        running = channel.unary_unary(INFER_PATH).future(infer_request(), timeout=WAIT_S)
        assert backend.entered.wait(WAIT_S)
        with pytest.raises(grpc.RpcError, match="this client may have 1 requests in progress; wait for one of them"):
            infer(channel)
        backend.release.set()
        assert running.result(WAIT_S)
        assert infer(channel) == 2


def infer_when_there_is_a_place(channel: grpc.Channel) -> float:
    while True:
        try:
            return infer(channel)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise


def test_a_request_that_is_cancelled_or_refused_gives_its_place_back(transport: TransportName) -> None:
    backend = HeldBackend(held=True)
    options = SecurityOptions(client_limits=ClientLimits(max_concurrent=1))
    with (
        guarded_server(options, transport, backend=backend) as (server, _),
        grpc.insecure_channel(server.address) as channel,
    ):
        with pytest.raises(grpc.RpcError, match="no_such_model"):
            call(channel, INFER_PATH, infer_request(model="no_such_model"))
        leaving = channel.unary_unary(INFER_PATH).future(infer_request(), timeout=WAIT_S)
        assert backend.entered.wait(WAIT_S)
        leaving.cancel()
        backend.release.set()
        assert infer_when_there_is_a_place(channel) == 2


def test_every_method_has_a_role_of_its_own() -> None:
    with guarded_server(SecurityOptions()) as (server, _):
        required = {path: rpc.access for path, rpc in server.service.rpcs.items()}
    assert UNKNOWN_METHOD not in required.values()
    changing = {
        f"/{SERVICE}/{name}" for name in ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings")
    }
    assert {path for path, access in required.items() if access.role is Role.ADMIN} == changing
    assert {path for path, access in required.items() if access.is_admin} == changing
    assert {path for path, access in required.items() if access.role is None} == {
        *(f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")),
        *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch")),
    }


def test_tokens_are_not_in_the_access_log(tmp_path: Path, transport: TransportName) -> None:
    log = tmp_path / "access.log"
    alice = tokens_in(tmp_path / "tokens", alice=Role.INFER)["alice"]
    observe = ObserveOptions(access_log=AccessLog.ALL, access_log_file=log)
    options = SecurityOptions(token_file=tmp_path / "tokens", client_limits=ClientLimits(requests_per_s=0.001, burst=1))
    with guarded_server(options, transport, observe=observe) as (server, _), grpc.insecure_channel(server.address) as channel:
        assert infer(channel, bearer(alice)) == 2
        with pytest.raises(grpc.RpcError, match="this client may send"):
            infer(channel, bearer(alice))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted((line["status"], line["token"]) for line in lines) == [("OK", "alice"), ("RESOURCE_EXHAUSTED", "alice")]
    assert alice not in log.read_text()


def test_errors_name_no_other_model(transport: TransportName) -> None:
    with guarded_server(SecurityOptions(), transport) as (server, _), grpc.insecure_channel(server.address) as channel:
        for method, message in (
            (INFER_PATH, infer_request(model="guess")),
            ("ModelMetadata", pb.ModelMetadataRequest(name="guess").SerializeToString()),
            ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="guess").SerializeToString()),
            ("TraceSetting", pb.TraceSettingRequest(model_name="guess").SerializeToString()),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(channel, method, message)
            assert "held" not in refused.value.details()
            assert refused.value.code() is not grpc.StatusCode.INTERNAL
