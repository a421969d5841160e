"""Large answers are written in pieces, and arrive whole."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.http.answer_writer import PIECE_BYTES, AnswerWriter
from halfserve.serve.http.http_options import HttpLimits, HttpOptions
from halfserve.serve.http.http_server import HttpServer
from halfserve.serve.http.rest_server import application
from halfserve.serve.http.routing.route_table import GuardedRoute, RestRoute
from halfserve.serve.protocol.rpc import DESCRIPTION
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.transports.task_turns import task_turns
from tests.serve.engine.fakes import HOLD_S
from tests.serve.running_server import RunningServer
from tests.serve.security.guarded import Certificates

BODY = np.random.default_rng(0).bytes(8 * PIECE_BYTES + 17)  # more than sockets hold
GET = b"GET /large HTTP/1.1\r\nhost: localhost\r\n"
KEPT, LAST = GET + b"\r\n", GET + b"connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("requests", "ends", "answers"),
    [(LAST, False, 1), (KEPT, True, 1), (KEPT + LAST, False, 2)],
    ids=["to_be_closed", "half_closed", "pipelined"],
)
def test_a_large_answer_arrives_whole(server: RunningServer, requests: bytes, ends: bool, answers: int) -> None:
    async def large(_: Request) -> Response:
        return Response(BODY)

    app = application([GuardedRoute(RestRoute("GET", "/large", DESCRIPTION), large)], "127.0.0.1", HttpOptions())
    listening = server.call(lambda: HttpServer(app, "127.0.0.1", 0, limits=HttpLimits()))
    port = server.run(listening.start())
    with socket.create_connection(("127.0.0.1", port), HOLD_S) as peer:
        peer.sendall(requests)
        received = bytearray(peer.recv(1))
        if ends:
            peer.shutdown(socket.SHUT_WR)
        while piece := peer.recv(2**20):
            received += piece
    assert [part.partition(b"\r\n\r\n")[2] for part in bytes(received).split(b"HTTP/1.1 200")[1:]] == [BODY] * answers
    server.run(listening.stop(0.0))


def test_an_answer_to_a_client_that_is_just_gone_leaves_no_stack_trace(
    server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over TLS, a connection is lost some steps before the server hears of it."""
    certificates = Certificates(tmp_path)
    entered, answered = threading.Event(), threading.Event()

    async def large(_: Request) -> Response:
        entered.set()
        (connection,) = listening._state.connections
        while not connection.writer.is_closing:  # noqa: ASYNC110  (each turn of the loop is looked at)
            await asyncio.sleep(0)
        answered.set()
        return Response(BODY)

    def make() -> HttpServer:
        app = application([GuardedRoute(RestRoute("GET", "/large", DESCRIPTION), large)], "127.0.0.1", HttpOptions())
        return HttpServer(app, "127.0.0.1", 0, limits=HttpLimits(), tls=ServerTls(certificates.options).context("http/1.1"))

    listening = server.call(make)
    port = server.run(listening.start())
    trust = ssl.create_default_context(cadata=certificates.trusted.decode())
    plain = socket.create_connection(("127.0.0.1", port), HOLD_S)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset ends the connection at once
    with trust.wrap_socket(plain, server_hostname="localhost") as peer:
        peer.sendall(KEPT)
        assert entered.wait(HOLD_S)
    assert answered.wait(HOLD_S)
    server.run(listening.stop(HOLD_S))
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


class Taking(asyncio.Transport):
    """Takes every byte at once.

    Attributes:
        written: what was written, with the loop iteration.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iteration, self.written = 0, list[tuple[int, bytes]]()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append((self.iteration, bytes(data)))

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Take every limit: nothing is kept."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False


def test_each_iteration_of_the_loop_writes_a_piece() -> None:
    transport = Taking()

    async def run() -> None:
        share = MemoryBudget(2**30).share(is_known=True)
        writer = AnswerWriter(transport, HttpLimits(), share, task_turns(), lambda: None)
        writer.write(b"head")
        writer.write(BODY)
        writer.write(b"end")
        assert writer.unread_bytes == len(BODY) + len(b"end") - PIECE_BYTES
        while writer.is_paused:
            transport.iteration += 1
            await asyncio.sleep(0)
        writer.lose()

    asyncio.run(run())
    assert b"".join(data for _, data in transport.written) == b"head" + BODY + b"end"
    sizes = dict.fromkeys(range(transport.iteration + 1), 0)
    for iteration, data in transport.written:
        sizes[iteration] += len(data)
    assert max(sizes.values()) <= PIECE_BYTES + len(b"head")
