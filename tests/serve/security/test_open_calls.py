"""Calls that began while their token held, and that bring their request when it does not any more."""

from __future__ import annotations

import socket
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest

from protos import inference_pb2 as pb
from serve.http.options import HttpOptions
from serve.http.rest_server import RestServer
from serve.protocol.service import SERVICE
from serve.security.options import SecurityOptions
from serve.security.roles import Role
from serve.transports.transport import TransportName
from tests.serve.running_server import RunningServer
from tests.serve.security.guarded import WAIT_S, WATCH_S, bearer, call, guarded_server, tokens_in

HEALTH = "/grpc.health.v1.Health/Check"
VERBOSE = "log_verbose_level"


def log_settings(level: int) -> bytes:
    message = pb.LogSettingsRequest()
    message.settings[VERBOSE].uint32_param = level
    return message.SerializeToString()


def level(server: RunningServer) -> object:
    return server.call(lambda: server.service.observability.logs.as_values()[VERBOSE])


UNLOAD = pb.RepositoryModelUnloadRequest(model_name="held").SerializeToString()


@pytest.mark.parametrize(
    ("method", "message", "is_sent_before"),
    [
        pytest.param("LogSettings", log_settings(1), False, id="unary"),
        pytest.param("RepositoryModelUnload", UNLOAD, False, id="stream"),
        pytest.param("RepositoryModelUnload", UNLOAD, True, id="the end of a stream"),
    ],
)
def test_a_call_is_not_answered_whose_token_was_revoked_before_its_end(
    tmp_path: Path, transport: TransportName, method: str, message: bytes, is_sent_before: bool
) -> None:
    path = tmp_path / "tokens"
    root = bearer(tokens_in(path, root=Role.ADMIN)["root"])
    with (
        guarded_server(SecurityOptions(token_file=path, watch_s=WATCH_S), transport) as (server, security),
        grpc.insecure_channel(server.address) as channel,
    ):
        parts: SimpleQueue[bytes | None] = SimpleQueue()
        begun = channel.stream_unary(f"/{SERVICE}/{method}").future(iter(parts.get, None), metadata=root, timeout=WAIT_S)
        if is_sent_before:
            parts.put(message)
        call(channel, HEALTH)  # by now the server knows of the one before it
        tokens_in(path, other=Role.ADMIN)
        server.call(security.reload)
        if not is_sent_before:
            parts.put(message)
        parts.put(None)
        assert begun.exception(WAIT_S).code() is grpc.StatusCode.UNAUTHENTICATED
        assert level(server) == 0


def test_the_same_over_http(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token = tokens_in(path, root=Role.ADMIN)["root"]
    with guarded_server(SecurityOptions(token_file=path, watch_s=WATCH_S)) as (server, security):
        options = HttpOptions(port=0, metrics_port=None)
        rest = server.call(lambda: RestServer(server.core, server.service, "127.0.0.1", options, security.main))
        server.run(rest.start())
        try:
            with socket.create_connection(("127.0.0.1", rest.port)) as peer:
                body = b'{"log_verbose_level": 1}'
                head = f"POST /v2/logging HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
                peer.settimeout(WAIT_S)
                peer.sendall(f"{head}expect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n".encode())
                assert peer.recv(65536).startswith(b"HTTP/1.1 100 ")
                tokens_in(path, other=Role.ADMIN)
                server.call(security.reload)
                peer.sendall(body)
                assert peer.recv(65536).startswith(b"HTTP/1.1 401 ")
            assert level(server) == 0
        finally:
            server.run(rest.stop(0.5))
