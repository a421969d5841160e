"""Tokens that end, on connections and in streams that are older than that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import UnauthenticatedError
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.protocol.service import INFER_PATH, INFER_STREAM_PATH, SERVICE
from halfserve.serve.security.file_reload import DAY_S
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.security.tokens import Tokens, new_token
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.transport import TransportName
from tests.serve.running_server import WAIT_S, RunningServer
from tests.serve.security.guarded import (
    WATCH_S,
    Clock,
    bearer,
    call,
    guarded_server,
    infer,
    infer_request,
    tokens_in,
    write_tokens,
)
from tests.serve.transports.nghttp2.http2_peer import call_headers, peer

EXPIRED = (grpc.StatusCode.UNAUTHENTICATED, "the token has expired; ask the server's administrator for another")
OTHERS = {"ServerMetadata": b"", "RepositoryIndex": b"", INFER_PATH: infer_request()}


class Ending:
    """A server whose clock can be set, the channel to it, and a token that ends in an hour."""

    def __init__(self, server: RunningServer, security: Security, channel: grpc.Channel, token: str, clock: Clock) -> None:
        self.server, self.security, self.channel = server, security, channel
        self.metadata, self.clock = bearer(token), clock

    def look_at_clock(self) -> None:
        """Connections remember a refusal until the next look at the clock: take it now."""
        self.server.call(self.security._look_at_clock)

    def refused(self, method: str, metadata: list[tuple[str, str]] | None = None) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refused:
            call(self.channel, method, OTHERS[method], metadata or self.metadata)
        return refused.value.code(), refused.value.details()


@pytest.fixture(scope="module")
def server(transport: TransportName, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ending]:
    path, clock = tmp_path_factory.mktemp("ending") / "tokens", Clock()
    (token,) = write_tokens(path, new_token("alice", [Role.INFER], expires_s=clock.now_s + 3600))
    options = SecurityOptions(token_file=path, watch_s=WATCH_S)
    with (
        guarded_server(options, transport, clock=clock) as (running, security),
        grpc.insecure_channel(running.address) as channel,
    ):
        yield Ending(running, security, channel, token, clock)


@pytest.fixture
def ending(server: Ending) -> Iterator[Ending]:
    began_s = server.clock.now_s
    yield server
    server.clock.now_s = began_s
    server.look_at_clock()  # what the connection remembers of a refusal is no other test's


def test_an_expired_token_is_refused_in_every_call(ending: Ending) -> None:
    ending.clock.now_s += 3599.999
    for method, message in OTHERS.items():
        call(ending.channel, method, message, ending.metadata)
    ending.clock.now_s += 0.001
    for method in OTHERS:
        assert ending.refused(method) == EXPIRED
    assert call(ending.channel, "ServerLive", metadata=ending.metadata)


def test_expiry_is_revealed_only_to_the_holder_of_the_token(ending: Ending) -> None:
    ending.clock.now_s += 3600
    name, value = ending.metadata[0]
    for guess in (value[:-1], value + "x", "Bearer hs_" + "x" * 43, "Bearer alice"):
        assert "it may have been revoked" in ending.refused(INFER_PATH, [(name, guess)])[1]


def test_a_stream_that_is_open_ends_to_be_served_when_its_token_does(ending: Ending) -> None:
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    open_stream = ending.channel.stream_stream(INFER_STREAM_PATH)
    answers = open_stream(iter(requests.get, None), metadata=ending.metadata, timeout=WAIT_S)

    def told() -> pb.ModelStreamInferResponse:
        requests.put(infer_request())
        return pb.ModelStreamInferResponse.FromString(next(answers))

    assert told().error_message == ""
    ending.clock.now_s += 3600
    refused = told()
    assert refused.error_message == EXPIRED[1]
    assert refused.infer_response.parameters["grpc-status"].int64_param == EXPIRED[0].value[0]
    requests.put(None)
    assert list(answers) == []


def test_tokens_are_valid_again_after_the_clock_is_set_back(ending: Ending) -> None:
    assert infer(ending.channel, ending.metadata) == 2
    ending.clock.now_s += 50 * 365 * DAY_S
    assert ending.refused(INFER_PATH) == EXPIRED
    ending.clock.now_s -= 50 * 365 * DAY_S
    ending.look_at_clock()
    assert infer(ending.channel, ending.metadata) == 2
    ending.clock.now_s -= 365 * DAY_S
    assert infer(ending.channel, ending.metadata) == 2


def test_a_connection_asks_again_though_its_headers_stay_the_same(tmp_path: Path) -> None:
    clock = Clock()
    (token,) = write_tokens(tmp_path / "tokens", new_token("alice", [Role.INFER], expires_s=clock.now_s + 1))
    # Nobody looks at the files or the clock meanwhile: each call does.
    options = SecurityOptions(token_file=tmp_path / "tokens", watch_s=3600)
    with guarded_server(options, clock=clock) as (server, _), peer(server) as client:
        for name, message in (("ServerMetadata", b""), ("ModelInfer", infer_request())):
            headers = call_headers(f"/{SERVICE}/{name}".encode(), authorization=f"Bearer {token}".encode())
            statuses = []
            for now_s in (clock.now_s, clock.now_s + 1):
                clock.now_s = now_s
                stream = client.http2.send_request(headers)
                client.http2.send_data(stream, frame(message), end_stream=True)
                client.push()
                statuses.append(client.status(stream))
            assert statuses == [(0, ""), (EXPIRED[0].value[0], EXPIRED[1])]
            clock.now_s -= 1


def test_a_clock_wrong_between_two_checks_locks_no_caller_out(tmp_path: Path) -> None:
    clock = Clock()
    (token,) = write_tokens(tmp_path / "tokens", new_token("alice", [Role.INFER], expires_s=clock.now_s + 1))
    headers = call_headers(f"/{SERVICE}/ModelInfer".encode(), authorization=f"Bearer {token}".encode())
    options = SecurityOptions(token_file=tmp_path / "tokens", watch_s=3600)
    with guarded_server(options, clock=clock) as (server, security), peer(server) as client:

        def status() -> tuple[int, str]:
            stream = client.http2.send_request(headers)
            client.http2.send_data(stream, frame(infer_request()), end_stream=True)
            client.push()
            return client.status(stream)

        clock.now_s += 1
        assert status() == (EXPIRED[0].value[0], EXPIRED[1])
        clock.now_s -= 1
        server.call(security._look_at_clock)
        assert status() == (0, "")


def test_tokens_that_end_soon_are_warned_of_once_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path, clock = tmp_path / "tokens", Clock()
    ends = {"late": 7 * DAY_S, "soon": 3.5 * DAY_S, "over": -1, "next": 6.5 * DAY_S}
    write_tokens(path, *(new_token(n, [Role.INFER], expires_s=int(clock.now_s + s)) for n, s in ends.items()))
    tokens = Tokens(path, clock)
    text = f"token file {path}: 'over' has expired, 'soon' expires in 3 days, 'next' expires in 6 days; `halfserve token` makes"
    assert [record.message for record in caplog.records] == [f"{text} new ones"]
    clock.now_s += DAY_S / 4
    assert not tokens.look_at_clock()
    assert len(caplog.records) == 2, "'late' ends within 7 days by now"
    assert not tokens.look_at_clock()
    assert len(caplog.records) == 2
    clock.now_s += 3.5 * DAY_S
    assert tokens.look_at_clock(), "'soon' is over"
    assert "'soon' has expired, 'next' expires in 2 days, 'late' expires in 3 days" in caplog.text
    tokens_in(path, alice=Role.INFER)
    tokens.reload()
    assert len(caplog.records) == 3


def test_many_tokens_that_end_soon_are_not_all_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    write_tokens(tmp_path / "tokens", *(new_token(f"t{n}", [Role.INFER], expires_s=clock.now_s + n) for n in range(1, 14)))
    Tokens(tmp_path / "tokens", clock)
    assert "'t10' expires within a day, and 3 more; `halfserve token` makes new ones" in caplog.text
    assert "'t11'" not in caplog.text


def test_a_file_of_expired_tokens_starts_and_admits_no_caller(tmp_path: Path) -> None:
    clock = Clock()
    (token,) = write_tokens(tmp_path / "tokens", new_token("alice", [Role.ADMIN], expires_s=clock.now_s))
    with pytest.raises(UnauthenticatedError, match="the token has expired"):
        Tokens(tmp_path / "tokens", clock).admit(f"Bearer {token}".encode(), Role.INFER)
