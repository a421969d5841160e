"""REST requests over HTTP/1.1 connections, each with one request in flight."""

from __future__ import annotations

import json

import h11

from halfserve.serve.benchmark.load.calls import OK, RECONNECT_TIMEOUT_S, ConnectionCalls, InFlightRequest
from halfserve.serve.benchmark.load.http2_connection import ConnectionLostError, SocketConnection
from halfserve.serve.benchmark.load.spec import LoadEndpoint

MAX_MESSAGE_BYTES = 4096  # kept bytes of an error's body
SUCCESS = 200
STREAM = 1  # the only one


class Http1Connection(SocketConnection):
    """A connection for one request at a time; a request that is given up ends it."""

    protocol = "http/1.1"

    def __init__(self, target: LoadEndpoint, timeout_s: float) -> None:
        super().__init__(target, timeout_s)
        self._socket.setblocking(False)

    @property
    def max_streams(self) -> int:
        return 1

    def queue(self, data: bytes) -> None:
        self._unsent = memoryview(data)
        self.unsent_bytes = len(data)

    def cancel(self, stream: int) -> None:  # noqa: ARG002  (there is one)
        self.usable = False

    def _more(self) -> bytes:
        return b""

    def _held_back_bytes(self) -> int:
        return len(self._unsent)


class RestCalls(ConnectionCalls):
    """Posts one body after the other."""

    connection: Http1Connection

    def __init__(self, target: LoadEndpoint) -> None:
        host = f"[{target.host}]" if ":" in target.host else target.host
        headers = [
            (b"host", f"{host}:{target.port}".encode()),
            (b"content-type", b"application/json"),
            (b"user-agent", b"halfserve-bench"),
            *((name.encode(), value.encode()) for name, value in target.headers),
        ]
        super().__init__(Http1Connection(target, RECONNECT_TIMEOUT_S), headers)
        self._path = target.path.encode()
        self._http = h11.Connection(h11.CLIENT)
        self._status = 0
        self._body = b""  # body of an answer that is an error

    @property
    def room(self) -> int:
        return 1 if self.connection.usable and not self.in_flight else 0

    def start(self, call: InFlightRequest, message: bytes) -> None:
        headers = [*self._headers, (b"content-length", b"%d" % len(message))]
        head = self._http.send(h11.Request(method=b"POST", target=self._path, headers=headers))
        body = self._http.send(h11.Data(data=message))
        self._http.send(h11.EndOfMessage())
        self.connection.queue((head or b"") + (body or b""))
        self.in_flight[STREAM] = call

    def receive(self) -> list[InFlightRequest]:
        try:
            data = self.connection.received()
        except ConnectionLostError:
            if self._http.their_state is not h11.SEND_BODY:
                raise
            data = b""  # the end of the connection may be that of an answer without a length
        if data is None:
            return []
        ended: list[InFlightRequest] = []
        try:
            self._http.receive_data(data)
            while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.ConnectionClosed):
                    break  # it comes again at every call
                if isinstance(event, h11.Response):
                    self._status, self._body = event.status_code, b""
                elif isinstance(event, h11.Data) and self._status != SUCCESS:
                    self._body += event.data[: MAX_MESSAGE_BYTES - len(self._body)]
                elif isinstance(event, h11.EndOfMessage):
                    ended += self._answered()
        except h11.RemoteProtocolError as error:
            raise ConnectionLostError(f"the server does not speak HTTP/1.1 as expected: {error}") from None
        return ended

    def _answered(self) -> list[InFlightRequest]:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.connection.usable = False  # the server closes the connection
        call = self.in_flight.pop(STREAM, None)
        if call is None:
            return []  # it was given up
        call.status = OK if self._status == SUCCESS else f"HTTP {self._status}"
        call.message = _reason(self._body)
        return [call]


def rest_calls(target: LoadEndpoint, _timeout_s: float | None) -> ConnectionCalls:
    """Open a connection for REST, whose driver keeps the time. Raises ConnectionLostError: the server does not answer."""
    return RestCalls(target)


def _reason(body: bytes) -> str:
    """Return the message in the body of an error, in one line."""
    try:
        found = json.loads(body)["error"]
        text = found["message"] if isinstance(found, dict) else str(found)
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())
