"""An HTTP/2 server of a few lines that does what a test wants, on a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ngh2 import Connection, RequestReceived, Role, StreamUnavailableError
from ngh2.exceptions import NGH2Error

from tests.serve.running_server import WAIT_S

HEADERS = [(b":status", b"200"), (b"content-type", b"application/grpc")]
OK = [(b"grpc-status", b"0")]

Behaviour = Callable[["Peer", int], None]


class Peer:
    """One connection as its behaviour sees it; the behaviour is called at every request with the stream's number.

    Attributes:
        asked: streams of all requests so far, on all connections.
    """

    def __init__(self, http2: Connection, asked: list[int], connection: socket.socket) -> None:
        self.http2 = http2
        self.asked = asked
        self._connection = connection

    def answer(self, stream: int, *trailers: tuple[bytes, bytes]) -> None:
        self.http2.send_response(stream, HEADERS)
        self.http2.send_data(stream, b"\0\0\0\0\0")
        self.http2.send_trailers(stream, list(trailers) or OK)

    def refuse(self, stream: int, *headers: tuple[bytes, bytes]) -> None:
        """Headers that are the whole answer."""
        self.http2.send_response(stream, list(headers), end_stream=True)

    def hang_up(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def peer(behaviour: Behaviour, settings: dict[int, int] | None = None) -> Iterator[tuple[str, int]]:
    """Run it; (host, port)."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[int] = []
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            sockets.append(connection)
            thread = threading.Thread(target=_serve, args=(connection, behaviour, asked, settings), name="peer connection")
            thread.start()
            threads.append(thread)

    accepting = threading.Thread(target=accept, name="peer")
    accepting.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(WAIT_S)
        for connection in sockets:
            _shut(connection)
        for thread in threads:
            thread.join(WAIT_S)


def _serve(connection: socket.socket, behaviour: Behaviour, asked: list[int], settings: dict[int, int] | None) -> None:
    http2 = Connection(Role.SERVER)
    http2.initiate_connection(settings)
    this = Peer(http2, asked, connection)
    with connection:
        try:
            connection.sendall(http2.data_to_send())
            while data := connection.recv(2**16):
                http2.receive_data(data)
                for event in http2.events():
                    if isinstance(event, RequestReceived):
                        asked.append(event.stream_id)
                        behaviour(this, event.stream_id)
                connection.sendall(http2.data_to_send())
        except (OSError, NGH2Error, StreamUnavailableError):
            return


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
