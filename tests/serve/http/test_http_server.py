from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.http.http_options import HttpLimits, HttpOptions, memory_of
from halfserve.serve.http.http_server import HttpServer
from halfserve.serve.http.request_body import FULL
from halfserve.serve.http.rest_server import RestServer, application
from halfserve.serve.http.routing.route_table import GuardedRoute, RestRoute
from halfserve.serve.protocol.rpc import DESCRIPTION, Method, Rpc, RpcCall
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.server import start_http
from halfserve.serve.transports.listening import BindError
from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.http.running_http import running_http
from tests.serve.http.test_inference import held_body, post, read_answer
from tests.serve.running_server import RunningServer, running_server

LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextmanager
def limited(server: RunningServer, limits: HttpLimits) -> Iterator[tuple[str, int]]:
    with running_http(server, limits=limits) as rest:
        yield "127.0.0.1", rest.port


@contextmanager
def listening(server: RunningServer, path: str, answer: Any) -> Iterator[tuple[HttpServer, int]]:
    """A server with one route, and its port."""
    app = application([GuardedRoute(RestRoute("GET", path, DESCRIPTION), answer)], "127.0.0.1", HttpOptions())
    made = server.call(lambda: HttpServer(app, "127.0.0.1", 0, limits=HttpLimits()))
    port = server.run(made.start())
    try:
        yield made, port
    finally:
        server.run(made.stop(1))


def ended(peer: socket.socket) -> bool:
    """Whether the server has closed the connection; waits until it has."""
    peer.settimeout(HOLD_S)
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("words", [b"", b"GET /v2 HT", b"GET /v2 HTTP/1.1\r\nhost: localhost\r\nx-slow: "], ids=range(3))
def test_a_client_that_dribbles_headers_is_cut_off(server: RunningServer, words: bytes) -> None:
    with limited(server, HttpLimits(header_s=0.05)) as address, socket.create_connection(address) as peer:
        peer.sendall(words)
        assert ended(peer)


def test_an_idle_connection_is_closed(server: RunningServer) -> None:
    with limited(server, HttpLimits(keep_alive_s=0.05)) as address, socket.create_connection(address) as peer:
        peer.sendall(LIVE)
        assert b"200" in read_answer(peer)
        assert ended(peer)


def test_an_answer_that_is_not_read_is_given_up(server: RunningServer) -> None:
    with running_http(server, limits=HttpLimits(stall_s=0.1)) as rest, socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", rest.port))
        request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for _ in range(200):  # some 10 MB of answers, more than the system keeps for anybody
            try:
                peer.sendall(request)
            except OSError:
                break
        server.until(lambda: not rest._servers[0].connections)


def test_connections_over_the_limit_get_503_and_retry_after(server: RunningServer) -> None:
    with limited(server, HttpLimits(max_connections=1)) as address, socket.create_connection(address) as first:
        first.sendall(LIVE)
        assert b"200" in read_answer(first)
        with socket.create_connection(address) as second:
            answer = read_answer(second)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close\r\n" in answer
            assert b'{"error":"too many connections are open; try again later"}' in answer
            assert ended(second)
        first.sendall(LIVE)
        assert b"200" in read_answer(first)


@pytest.mark.parametrize(
    "words",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 50_000,
        b"HEAD /v2 HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
    ids=["tls", "two-hosts", "two-lengths", "long", "head"],
)
def test_invalid_http_is_answered_and_not_logged(rest: RestServer, words: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", rest.port)) as peer:
        peer.sendall(words)
        answer = read_answer(peer)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'{"error":"the request is not HTTP/1.1 as this server reads it' in answer
    assert caplog.records == []


def test_an_unexpected_error_is_logged_and_not_sent(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: Request) -> Response:
        raise KeyError("/secret/path")

    with listening(server, "/fail", fail) as (_, port):
        answer = httpx.get(f"http://127.0.0.1:{port}/fail", timeout=60)
    assert (answer.status_code, answer.json()) == (500, {"error": "the server failed on this request; its log says why"})
    assert answer.headers["connection"] == "close"
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize("begins", [False, True])
def test_an_application_that_stops_short_ends_its_connection(
    server: RunningServer, caplog: pytest.LogCaptureFixture, begins: bool
) -> None:
    async def stop_short(_: Any, __: Any, send: Any) -> None:
        if begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})

    made = server.call(lambda: HttpServer(stop_short, "127.0.0.1", 0, limits=HttpLimits()))
    with socket.create_connection(("127.0.0.1", server.run(made.start())), HOLD_S) as peer, peer.makefile("rb") as answer:
        peer.sendall(LIVE)
        said = answer.read()  # until the end
    server.run(made.stop(1))
    if begins:
        assert said.endswith(b"begun\r\n"), "the client must see that the answer is not whole"
    else:
        assert said.startswith(b"HTTP/1.1 500 ")
        assert said.endswith(b'{"error":"the server failed on this request; its log says why"}')
    assert "the application ended before its answer was complete" in caplog.text


def test_websockets_are_answered_as_what_they_also_are(http: httpx.Client) -> None:
    answer = http.get("/v2/health/live", headers={"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x"})
    assert (answer.status_code, answer.content) == (200, b"")


def test_more_is_not_received_than_can_be_held(server: RunningServer) -> None:
    budget = MemoryBudget(memory_of(1000))
    head = b"POST /v2/models/unbatched/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    with (
        running_http(server, budget=budget) as rest,
        socket.create_connection(("127.0.0.1", rest.port)) as first,
        socket.create_connection(("127.0.0.1", rest.port)) as second,
        socket.create_connection(("127.0.0.1", rest.port)) as third,
        socket.create_connection(("127.0.0.1", rest.port)) as small,
    ):
        for count, one in enumerate((first, second), 1):  # one beyond the budget fits
            one.sendall(head % 700 + b" " * 600)
            while server.call(lambda: budget.held_bytes) < count * memory_of(600):
                pass
        third.sendall(head % 700 + b" " * 700)
        answer = read_answer(third)
        assert b"503" in answer.splitlines()[0]
        assert FULL.encode() in answer
        small.sendall(head % 100 + b" " * 100)  # less than its part
        assert b"400" in read_answer(small).splitlines()[0]
        for one in (second, first):
            one.sendall(b" " * 100)
            assert b"400" in read_answer(one).splitlines()[0]


def test_requests_may_be_pipelined(rest: RestServer) -> None:
    with socket.create_connection(("127.0.0.1", rest.port)) as peer:
        peer.sendall(LIVE * 3)
        peer.settimeout(HOLD_S)
        data = b""
        while data.count(b"HTTP/1.1 200") < 3:
            more = peer.recv(65536)
            assert more, data
            data += more


def test_draining_finishes_what_was_taken() -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend)]) as server,
        running_http(server) as rest,
        socket.create_connection(("127.0.0.1", rest.port)) as busy,
        socket.create_connection(("127.0.0.1", rest.port)) as idle,
        ThreadPoolExecutor(2) as threads,
    ):
        idle.sendall(LIVE)
        read_answer(idle)
        post(busy, held_body(1))
        assert backend.entered.wait(HOLD_S)
        draining = threads.submit(lambda: server.run(server.core.drain()))
        while server.call(lambda: server.core.is_ready):
            pass
        ready = httpx.get(f"http://127.0.0.1:{rest.port}/v2/health/ready", timeout=60)
        assert (ready.status_code, ready.json()["error"][:36]) == (503, "the server takes no requests now; se")
        refused = httpx.post(f"http://127.0.0.1:{rest.port}/v2/models/held/infer", json=held_body(2), timeout=60)
        assert refused.status_code == 503
        stopping = threads.submit(lambda: server.run(rest.stop(HOLD_S)))
        assert ended(idle)
        backend.release.set()
        assert b'"data":[2.0]' in read_answer(busy)
        assert ended(busy)
        stopping.result(HOLD_S)
        draining.result(HOLD_S)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{rest.port}/v2", timeout=60)


def test_connections_in_use_end_with_an_answer_that_says_so() -> None:
    with (
        running_server(lambda: [held_model(HeldBackend())]) as server,
        running_http(server) as rest,
        ThreadPoolExecutor(1) as threads,
        socket.create_connection(("127.0.0.1", rest.port)) as busy,
    ):
        busy.sendall(LIVE)
        assert b"connection: close" not in read_answer(busy)
        noticing = threads.submit(lambda: server.run(rest.give_notice()))
        answer = b""
        while b"connection: close" not in answer:
            is_given = noticing.done()
            busy.sendall(LIVE)
            answer = read_answer(busy)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in answer or not is_given
        assert ended(busy)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{rest.port}/v2", timeout=60)
        noticing.result(HOLD_S)


def test_a_late_answer_announces_the_end_of_its_connection() -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend)]) as server,
        running_http(server) as rest,
        socket.create_connection(("127.0.0.1", rest.port)) as busy,
    ):
        post(busy, held_body())
        assert backend.entered.wait(HOLD_S)
        server.call(rest._servers[0]._tell_time)  # as each second
        server.run(rest.give_notice())
        backend.release.set()
        assert b"connection: close" in read_answer(busy)


def test_what_does_not_end_in_time_is_cut_off_with_503(caplog: pytest.LogCaptureFixture) -> None:
    backend = HeldBackend(held=True)
    with (
        running_server(lambda: [held_model(backend)]) as server,
        running_http(server) as rest,
        socket.create_connection(("127.0.0.1", rest.port)) as busy,
        socket.create_connection(("127.0.0.1", rest.port)) as sending,
        socket.create_connection(("127.0.0.1", rest.port)) as idle,
    ):
        tasks = rest._servers[0]._state.tasks
        post(busy, held_body(1))
        sending.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        idle.sendall(LIVE)
        read_answer(idle)
        assert backend.entered.wait(HOLD_S)
        while server.call(lambda: len(tasks)) < 2:
            pass
        server.run(rest.stop(0.01))
        for one, form in ((busy, b'{"error":"'), (sending, b'{"error":{"message":"')):
            answer = read_answer(one)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert form + b"the server ended before it could answer; send the request again" in answer
            assert ended(one)
        assert ended(idle)
        backend.release.set()
    assert [one.getMessage() for one in caplog.records] == ["HTTP requests that were not answered before the server ended: 2"]


def test_an_answer_that_has_begun_is_broken_off_at_the_end(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"begun"
        await asyncio.Event().wait()

    async def stream(_: Request) -> Response:
        return StreamingResponse(pieces())

    with listening(server, "/stream", stream) as (http, port), socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        peer.settimeout(HOLD_S)
        answer = b""
        while not answer.endswith(b"begun\r\n"):
            answer += peer.recv(65536)
        server.run(http.stop(0.01))
        assert peer.recv(65536) == b"", "the client must see that the answer is not whole"
    assert [one.getMessage() for one in caplog.records] == ["HTTP requests that were not answered before the server ended: 1"]


def test_a_slowly_read_answer_is_complete_before_the_server_stops(server: RunningServer) -> None:
    """More than sockets hold; the process may end as soon as its server has stopped."""
    size = 2**24

    async def large(_: Request) -> Response:
        return Response(bytes(size))

    async def stop(http: HttpServer) -> int:
        (connection,) = http._state.connections
        await asyncio.gather(http.stop(HOLD_S), http.stop(0.0))
        return connection.writer.unread_bytes

    with (
        listening(server, "/large", large) as (http, port),
        socket.create_connection(("127.0.0.1", port)) as slow,
        ThreadPoolExecutor(1) as threads,
    ):
        slow.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        slow.settimeout(HOLD_S)
        got = len(slow.recv(1))
        stopping = threads.submit(lambda: server.run(stop(http)))
        while piece := slow.recv(2**16):
            got += len(piece)
        assert got > size
        assert stopping.result(HOLD_S) == 0


def test_a_port_in_use_is_a_bind_error_and_no_port_is_kept(server: RunningServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(
                BindError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --http-port"
            ),
            running_http(server, HttpOptions(port=port, metrics_port=0)),
        ):
            pass
        with (
            pytest.raises(BindError, match=f"{port}: Address already in use; choose another --metrics-port"),
            running_http(server, HttpOptions(port=0, metrics_port=port)),
        ):
            pass


def test_an_unknown_host_is_a_bind_error(server: RunningServer) -> None:
    service = server.call(lambda: Service(server.core, server_version="0"))
    rest = server.call(lambda: RestServer(server.core, service, "no.such.host.invalid", HttpOptions(port=0)))
    with pytest.raises(BindError, match="cannot listen on no.such.host.invalid:0: .* or --host"):
        server.run(rest.start())


def test_without_http_options_nothing_is_imported() -> None:
    script = (
        "import asyncio, sys, halfserve.serve.server\n"
        "from halfserve.serve.server import start_http\n"
        "assert asyncio.run(start_http(None, None, 'localhost', None)) is None\n"
        "print([name for name in ('starlette', 'h11', 'anyio') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_with_options_it_listens(server: RunningServer) -> None:
    service = server.call(lambda: Service(server.core, server_version="0"))
    rest = server.run(start_http(server.core, service, "localhost", HttpOptions(port=0, metrics_port=None)))
    assert rest is not None
    try:
        assert httpx.get(f"http://localhost:{rest.port}/v2", timeout=60).json()["version"] == "0"
        with pytest.raises(BindError, match="Address already in use; choose another --http-port"):
            server.run(start_http(server.core, service, "127.0.0.1", HttpOptions(port=rest.port, metrics_port=None)))
    finally:
        server.run(rest.stop(1))


def test_metrics_are_on_both_ports(rest: RestServer) -> None:
    for port in (rest.port, rest.metrics_port):
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert "halfserve_http_connections " in answer.text
        assert 'nv_inference_request_success{model="mlp",version="1"}' in answer.text


def test_the_metrics_port_has_nothing_else(rest: RestServer) -> None:
    for path in ("/", "/v2", "/ui/state", "/openapi.json"):
        assert httpx.get(f"http://127.0.0.1:{rest.metrics_port}{path}", timeout=60).status_code == 404


def test_there_may_be_no_metrics_port_and_no_page(server: RunningServer) -> None:
    with running_http(server, HttpOptions(port=0, metrics_port=None, page=False)) as rest:
        assert rest.metrics_port is None
        assert httpx.get(f"http://127.0.0.1:{rest.port}/", timeout=60).status_code == 404
        assert httpx.get(f"http://127.0.0.1:{rest.port}/v2", timeout=60).status_code == 200


def test_an_rpc_over_rest_knows_its_client() -> None:
    calls: list[RpcCall] = []

    def layer(_: Rpc, method: Method) -> Method:
        async def noted(request: Any, call: RpcCall) -> Any:
            calls.append(call)
            return await method(request, call)

        return noted

    async def asked() -> None:
        service = Service(InferenceCore([]), server_version="0.0.test")
        service.spread(layer)
        rest = RestServer(service.core, service, "127.0.0.1", HttpOptions(port=0, metrics_port=None))
        await rest.start()
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{rest.port}/v2", headers={"x-request-id": "a"})
        await rest.stop(0.5)
        assert answer.status_code == 200

    asyncio.run(asked())
    (call,) = calls
    assert call.peer.startswith("127.0.0.1:")
    assert call.headers[b"x-request-id"] == b"a"


def test_metrics_are_served_without_rest(server: RunningServer) -> None:
    with running_http(server, HttpOptions(port=None, metrics_port=0)) as rest:
        assert (rest.port, bool(rest.metrics_port)) == (0, True)
        answer = httpx.get(f"http://127.0.0.1:{rest.metrics_port}/metrics")
        assert (answer.status_code, "halfserve_ready 1" in answer.text) == (200, True)
        assert httpx.get(f"http://127.0.0.1:{rest.metrics_port}/v2").status_code == 404
