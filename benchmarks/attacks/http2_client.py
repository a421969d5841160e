"""A client that keeps to HTTP/2's windows, so that no server can end its connection for that, and reads only if it wants to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ngh2 import Connection, Role
from ngh2.exceptions import NGH2Error

from benchmarks.harness.http2_frames import connected

QUEUED_BYTES = 65_536  # of one stream: more is handed over when that has left
READ_BYTES = 262_144


class Http2Client:
    """One connection; never waits.

    Attributes:
        sent: bytes that the server has taken.
        is_open: the server has not closed it.
    """

    def __init__(self, address: str, settings: dict[int, int] | None = None, window_bytes: int = 65_535) -> None:
        """Connect and greet.

        Args:
            address: HOST:PORT.
            settings: HTTP/2 settings to send.
            window_bytes: flow-control window of the connection for the server's data.
        """
        self._socket = connected(address)
        self._socket.setblocking(False)
        self._http2 = Connection(Role.CLIENT)
        self._http2.initiate_connection(settings)
        if window_bytes > 65_535:
            self._http2.set_local_window_size(window_bytes)
        self._bodies: dict[int, tuple[memoryview, bool]] = {}  # stream -> what is left to send, and whether that is its end
        self._rest = b""
        self.sent, self.is_open = 0, True

    def call(self, path: bytes, body: bytes | memoryview, *, end: bool) -> None:
        """Begin a call of the method `path`; `end` tells whether the call's message ends with `body`."""
        headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost")]
        with contextlib.suppress(NGH2Error):
            stream = self._http2.send_request([*headers, (b"te", b"trailers"), (b"content-type", b"application/grpc")])
            self._bodies[stream] = memoryview(body), end

    def go_on(self, *, reads: bool = True) -> bool:
        """Read, unless told not to, and send what the windows and the socket take; whether anything was sent."""
        try:
            if reads:
                self._read()
            self._fill()
            return self._send()
        except (OSError, NGH2Error):
            self.is_open = False
            return False

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionResetError
            self._http2.receive_data(data)
            self._http2.events()

    def _fill(self) -> None:
        for stream, (body, end) in list(self._bodies.items()):
            try:
                if self._http2.queued_body_size(stream) >= QUEUED_BYTES:
                    continue
                is_last = len(body) <= QUEUED_BYTES
                self._http2.send_data(stream, body[:QUEUED_BYTES], end_stream=is_last and end)
            except NGH2Error:  # the server has ended it
                is_last = True
            if is_last:
                del self._bodies[stream]
            else:
                self._bodies[stream] = body[QUEUED_BYTES:], end

    def _send(self) -> bool:
        has_sent = False
        while self._rest or (data := self._http2.data_to_send()):
            try:
                count = self._socket.send(self._rest or data)
            except BlockingIOError:
                self._rest = self._rest or data
                break
            self._rest = (self._rest or data)[count:]
            self.sent += count
            has_sent = True
        return has_sent


def told(clients: Iterable[Http2Client]) -> str:
    """Return how far they came."""
    clients = list(clients)
    sent, closed = sum(client.sent for client in clients), sum(not client.is_open for client in clients)
    return f"{sent / 2**20:.0f} MiB sent over {len(clients)} connections, {closed} of them closed by the server"
