"""What many connections make a server hold together: unfinished messages, requests in the queue, answers that are not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from ngh2 import GoAwayReceived, PingAcknowledged, ResponseReceived

from halfserve.serve.protocol.rpc import Role
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.memory_budget import STRANGERS_PART, MemoryBudget
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.security.tokens import new_token
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.frames import ENHANCE_YOUR_CALM
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import INITIAL_WINDOW_SIZE, Http2Peer, call_headers, padded, peer

LIMIT = 16 * 2**20
CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"
FULL = "the server holds as many requests and unread answers as it may (--max-buffered-mib); retry with back-off"
TURNS = 4  # in which a client learns how much it may send, and sends it
READING_ALL = 2**30


def answered(client: Http2Peer, message: bytes) -> tuple[int, str]:
    """The status of an inference."""
    return client.status(client.call(frame(message)))


def turn(client: Http2Peer) -> None:
    """Send what the windows allow, and wait until the server has read it."""
    seen = len(client.events)
    client.http2.ping()
    client.push()
    while not any(isinstance(event, PingAcknowledged) for event in client.events[seen:]):
        assert client.read()


class Crowd:
    """A server with a budget of its own, and clients of it."""

    def __init__(self, server: RunningServer, budget: MemoryBudget, clients: ExitStack) -> None:
        self.server, self._budget, self._clients = server, budget, clients

    @property
    def held_bytes(self) -> int:
        return self.server.call(lambda: self._budget.held_bytes)

    def until(self, reached: Callable[[int], bool]) -> None:
        """Ask how much is held until it is as expected; each question is a turn of the event loop."""
        self.server.until(lambda: reached(self._budget.held_bytes))

    def client(self, settings: dict[int, int] | None = None) -> Http2Peer:
        return self._clients.enter_context(peer(self.server, settings))

    def begin(self, client: Http2Peer, size: int, come: int, path: bytes | None = None) -> int:
        """Send some of a message, as far as the windows allow, and wait until that has been received."""
        stream = int(client.http2.send_request(call_headers() if path is None else call_headers(path)))
        client.http2.send_data(stream, frame(bytes(size))[:come])
        for _ in range(TURNS):
            turn(client)
        return stream


@contextmanager
def crowd(repository: Path, make: Callable[..., Nghttp2Server] = Nghttp2Server, **limits: Any) -> Iterator[Crowd]:
    budget = MemoryBudget(LIMIT, patience_s=0.3)
    made = partial(make, limits=TransportLimits(sweep_s=0.01, **limits), budget=budget)
    with running_server(lambda: load_repository(repository), made) as server, ExitStack() as clients:
        yield Crowd(server, budget, clients)


def test_unfinished_messages_of_many_connections_keep_to_the_budget(repository: Path) -> None:
    with crowd(repository) as many:
        for _ in range(40):  # 40 MB in all
            many.begin(many.client(), 2_000_000, 1_000_000)
        many.until(lambda held: held > LIMIT // 2)
        client = many.client()
        for _ in range(100):
            turn(client)
            assert many.held_bytes < LIMIT * 1.2
        assert answered(client, padded(50_000)) == (0, "")


def test_what_is_given_up_is_free_again(repository: Path) -> None:
    with crowd(repository) as many:
        clients = [many.client() for _ in range(10)]
        for client in clients:
            many.begin(client, 1_000_000, 500_000)
        many.until(lambda held: held > 2_000_000)
        for client in clients:
            client.socket.close()
        many.until(lambda held: held == 0)


def test_one_large_message_fits_while_others_have_taken_the_budget(repository: Path) -> None:
    with crowd(repository) as many:
        for _ in range(6):
            many.begin(many.client(), 8_000_000, 4_000_000)
        many.until(lambda held: held > LIMIT // 2)
        client = many.client({INITIAL_WINDOW_SIZE: READING_ALL})
        client.http2.set_local_window_size(READING_ALL)
        assert client.status(client.call(frame(padded(2 * LIMIT)))) == (0, "")


def gated(folder: Path) -> tuple[Callable[..., Nghttp2Server], str]:
    """What makes servers that ask for tokens, and a token."""
    token, line = new_token("somebody", [Role.INFER])
    (folder / "tokens").write_text(f"{line}\n")

    def make(service: Service, host: str, port: int, **options: Any) -> Nghttp2Server:
        security = Security(SecurityOptions(token_file=folder / "tokens"), service.core.figures.refuse)
        return Nghttp2Server(service, host, port, gate=security.main.gate, **options)

    return make, token


def test_strangers_have_a_sixteenth_and_clients_with_a_token_the_rest(repository: Path, tmp_path: Path) -> None:
    make, token = gated(tmp_path)
    with crowd(repository, make) as many:
        for _ in range(40):
            many.begin(many.client(), 1_000_000, 60_000, CHECK)
        many.until(lambda held: held > LIMIT // STRANGERS_PART // 2)
        for _ in range(100):
            assert many.held_bytes < LIMIT // STRANGERS_PART * 1.3
        stranger, known = many.client(), many.client()
        stream = stranger.call(frame(b""), CHECK)
        assert stranger.status(stream) == (0, "")
        assert known.status(known.call(frame(padded(LIMIT // 2)), authorization=b"Bearer " + token.encode())) == (0, "")


def test_watches_are_as_many_as_the_budget_holds(repository: Path) -> None:
    with crowd(repository) as many:
        clients = [many.client() for _ in range(2)]
        streams = [(client, client.http2.send_request(call_headers(WATCH))) for client in clients for _ in range(1000)]
        for client, stream in streams:
            client.http2.send_data(stream, frame(b""), end_stream=True)
        for client in clients:
            client.push()
        headers = [dict(cast("ResponseReceived", client.until(ResponseReceived, stream)).headers) for client, stream in streams]
        refused = [fields[b"grpc-message"].decode() for fields in headers if b"grpc-status" in fields]
        assert 600 < len(refused) < 1200
        assert set(refused) == {FULL}
        assert many.held_bytes < LIMIT * 1.2


def test_strangers_who_go_on_asking_for_more_than_there_is_are_sent_away(repository: Path, tmp_path: Path) -> None:
    make, _ = gated(tmp_path)
    with crowd(repository, make, max_refused=10) as many:
        client = many.client()
        for _ in range(1000):
            client.http2.send_data(client.http2.send_request(call_headers(WATCH)), frame(b""), end_stream=True)
        client.push()
        while not (ends := [event for event in client.events if isinstance(event, GoAwayReceived)]):
            assert client.read()
        assert [end.error_code for end in ends] == [ENHANCE_YOUR_CALM]
        answers = [dict(event.headers) for event in client.events if isinstance(event, ResponseReceived)]
        assert sum(b"grpc-status" in headers for headers in answers) < 20
        assert client.is_closed_by_server()
        many.until(lambda held: held == 0)


def test_answers_that_nobody_reads_keep_to_the_budget(repository: Path) -> None:
    with crowd(repository, short_stall_s=1000.0) as many:
        client = many.client({INITIAL_WINDOW_SIZE: 0})
        streams = [client.http2.send_request(call_headers()) for _ in range(200)]
        for stream in streams:
            client.http2.send_data(stream, frame(padded(200_000)), end_stream=True)
        while many.held_bytes < LIMIT // 2:
            turn(client)
        for _ in range(100):
            turn(client)
            assert many.held_bytes < LIMIT * 1.2
        assert answered(many.client(), padded(100_000)) == (0, "")
        client.http2.update_settings({INITIAL_WINDOW_SIZE: READING_ALL})
        client.http2.set_local_window_size(READING_ALL)
        client.push()
        statuses = [client.status(stream)[0] for stream in streams]
        assert set(statuses) <= {0, 8}
        assert statuses[0] == 0
        many.until(lambda held: held == 0)


def test_who_reads_no_answer_for_too_long_is_closed(repository: Path) -> None:
    with crowd(repository, stall_s=0.1) as many:
        client = many.client({INITIAL_WINDOW_SIZE: 0})
        client.call(frame(padded(50_000)))
        assert client.is_closed_by_server()
        many.until(lambda held: held == 0)
