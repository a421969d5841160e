"""gRPC calls over HTTP/2 connections: one call per request or long-lived streams, and the connection pool."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

from ngh2 import DataReceived, ResponseReceived, StreamClosed, StreamReset, TrailersReceived

from halfserve.serve.benchmark.load.http2_connection import ConnectionLostError, Http2Connection, SocketConnection
from halfserve.serve.benchmark.load.spec import LoadEndpoint, LoadSpec

PREFIX_BYTES = 5  # prefix of a gRPC message: a compression flag, then the length in four bytes, big-endian
STATUSES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
OK = "OK"
ERROR_FIELD = b"\x0a"  # ModelStreamInferResponse.error_message: field 1, length-delimited; an answer begins with field 2
OK_TRAILERS = ((b"grpc-status", b"0"),)
OK_RESPONSE = ((b":status", b"200"), (b"content-type", b"application/grpc"))
NO_STATUS = "the server ended the call without a status"
NO_MESSAGE = "the server ended the call with OK, but without a message"
NO_WHOLE_MESSAGE = "the server ended the call with OK, but its answer is not one whole message"
# Status of a call whose stream was reset: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#errors
RESETS = {0x7: "UNAVAILABLE", 0x8: "CANCELLED", 0xB: "RESOURCE_EXHAUSTED", 0xC: "PERMISSION_DENIED"}
Headers = Sequence[tuple[bytes, bytes]]
MAX_CONNECTIONS = 500  # select supports at most 1024 descriptors
RETRY_S = 0.1
GIVE_UP_S = 1.0  # a server that accepts no connection for this long is considered gone
RECONNECT_TIMEOUT_S = 1.0


class InFlightRequest:
    __slots__ = ("answer_bytes", "answer_prefix", "intended_ns", "message", "model", "status")

    def __init__(self, model: int, intended_ns: int) -> None:
        self.model = model  # index of its model
        self.intended_ns = intended_ns  # time at which it was due, in nanoseconds
        self.status: str | None = None  # name of its gRPC status; set once the status is known
        self.message = ""  # status message of the server
        self.answer_bytes = 0  # bytes received so far, including the prefix of the answer's message
        self.answer_prefix = b""  # the first PREFIX_BYTES of the answer

    def take(self, data: bytes) -> None:
        if len(self.answer_prefix) < PREFIX_BYTES:
            self.answer_prefix += data[: PREFIX_BYTES - len(self.answer_prefix)]
        self.answer_bytes += len(data)

    def require_message(self) -> None:
        """Fail a request that ended with OK if its answer is not exactly one message."""
        if self.status != OK:
            return
        if not self.answer_bytes:
            self.status, self.message = "INTERNAL", NO_MESSAGE
        elif self.answer_bytes != PREFIX_BYTES + int.from_bytes(self.answer_prefix[1:], "big"):
            self.status, self.message = "INTERNAL", NO_WHOLE_MESSAGE


def call_headers(target: LoadEndpoint, timeout_s: float | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of a call; `timeout_s` is None for a call without a deadline."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http" if target.tls is None else b"https"),
        (b":path", target.path.encode()),
        (b":authority", target.address.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"halfserve-bench"),
        *((name.encode(), value.encode()) for name, value in target.headers),
    ]
    if timeout_s is not None:
        headers.append((b"grpc-timeout", _timeout(timeout_s)))
    return headers


def framed(message: bytes) -> bytes:
    """Add the gRPC prefix to a message."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class ConnectionCalls(ABC):
    """The calls of one connection."""

    def __init__(self, connection: SocketConnection, headers: Headers) -> None:
        self.connection = connection
        self.in_flight: dict[int, InFlightRequest] = {}  # requests in flight by stream, the oldest first
        self._headers = headers
        self._capacity = connection.max_streams

    @property
    @abstractmethod
    def room(self) -> int:
        """Number of requests that can be sent now."""

    @abstractmethod
    def start(self, call: InFlightRequest, message: bytes) -> None:
        """Send a request; `message` has its gRPC prefix, or is the body of an HTTP request."""

    @abstractmethod
    def receive(self) -> list[InFlightRequest]:
        """Read the received data and return the requests that have ended.
        Raises ConnectionLostError: the connection is lost, and with it every request in flight.
        """

    def expired(self, before_ns: int) -> list[InFlightRequest]:
        """Cancel and return the requests that were due before a time."""
        ended: list[InFlightRequest] = []
        while self.in_flight:
            stream, call = next(iter(self.in_flight.items()))
            if call.intended_ns > before_ns:
                break
            del self.in_flight[stream]
            self.connection.cancel(stream)
            call.status, call.message = "DEADLINE_EXCEEDED", "no answer in time"
            ended.append(call)
        return ended


class UnaryCalls(ConnectionCalls):
    """Makes one call per request."""

    connection: Http2Connection

    @property
    def room(self) -> int:
        return self._capacity - len(self.in_flight) if self.connection.usable else 0

    def start(self, call: InFlightRequest, message: bytes) -> None:
        http2 = self.connection.http2
        stream = http2.send_request(self._headers)
        http2.send_data(stream, message, end_stream=True)
        self.connection.unsent_bytes += len(message)
        self.in_flight[stream] = call

    def receive(self) -> list[InFlightRequest]:
        ended: list[InFlightRequest] = []
        in_flight = self.in_flight
        event: Any  # its class decides: isinstance, which mypy could follow, takes four times as long
        for event in self.connection.receive():
            kind = type(event)
            if kind is StreamClosed or kind is StreamReset:
                call = in_flight.pop(event.stream_id, None)
                if call is not None:
                    if call.status is None:
                        note_reset(call, event.error_code)
                    ended.append(call)
            elif kind is TrailersReceived or kind is ResponseReceived:
                call = in_flight.get(event.stream_id)
                if call is not None and event.headers != OK_RESPONSE:
                    note_status(call, event.headers)
                    call.require_message()
            elif kind is DataReceived:
                call = in_flight.get(event.stream_id)
                if call is not None:
                    call.take(event.data)
            else:
                self.connection.note(event)
        return ended


class StreamingCalls(ConnectionCalls):
    """Keeps calls open, each with one request in flight; a call whose request was answered takes the next one."""

    connection: Http2Connection

    def __init__(self, connection: Http2Connection, headers: Headers) -> None:
        super().__init__(connection, headers)
        self._idle: list[int] = []
        self._open: dict[int, bytearray] = {}  # stream -> the part of an answer received so far
        self._endings: dict[int, InFlightRequest] = {}  # stream -> holder of the status in its trailers

    @property
    def room(self) -> int:
        return len(self._idle) + self._capacity - len(self._open) if self.connection.usable else 0

    def start(self, call: InFlightRequest, message: bytes) -> None:
        http2 = self.connection.http2
        if self._idle:
            stream = self._idle.pop()
        else:
            stream = http2.send_request(self._headers)
            self._open[stream] = bytearray()
        http2.send_data(stream, message)
        self.connection.unsent_bytes += len(message)
        self.in_flight[stream] = call

    def receive(self) -> list[InFlightRequest]:
        ended: list[InFlightRequest] = []
        for event in self.connection.receive():
            if isinstance(event, DataReceived):
                ended += self._data(event)
            elif isinstance(event, StreamClosed | StreamReset):
                ended += self._gone(event.stream_id, event.error_code)
            elif isinstance(event, TrailersReceived | ResponseReceived):
                note_status(self._endings.setdefault(event.stream_id, InFlightRequest(0, 0)), event.headers)
            else:
                self.connection.note(event)
        return ended

    def _data(self, event: DataReceived) -> Iterator[InFlightRequest]:
        held = self._open.get(event.stream_id)
        if held is None:
            return
        held += event.data
        while len(held) >= PREFIX_BYTES:
            end = PREFIX_BYTES + int.from_bytes(held[1:PREFIX_BYTES], "big")
            if len(held) < end:
                return
            message = bytes(held[PREFIX_BYTES:end])
            del held[:end]
            call = self.in_flight.pop(event.stream_id, None)
            if call is not None:
                self._idle.append(event.stream_id)
                call.status, call.message = _streamed_status(message)
                yield call

    def _gone(self, stream: int, code: int) -> Iterator[InFlightRequest]:
        self._open.pop(stream, None)
        if stream in self._idle:
            self._idle.remove(stream)
        ending, call = self._endings.pop(stream, None), self.in_flight.pop(stream, None)
        if call is not None:
            if ending is None or ending.status in (None, OK):
                note_reset(call, code)  # the call's OK is not an answer to the request that waits in it
            else:
                call.status, call.message = ending.status, ending.message
            yield call


def note_reset(call: InFlightRequest, code: int) -> None:
    """Set the status from the HTTP/2 error code of a stream that ended before a status came."""
    if code == 0:
        call.status, call.message = "UNKNOWN", NO_STATUS
    else:
        call.status, call.message = RESETS.get(code, "INTERNAL"), f"the server reset the call (HTTP/2 error {code:#x})"


def note_status(call: InFlightRequest, headers: Headers) -> None:
    """Set the status from headers that contain one."""
    if headers == OK_TRAILERS:
        call.status = OK
        return
    for name, value in headers:
        if name == b"grpc-status":
            number = int(value) if value.isdigit() else -1
            call.status = STATUSES[number] if 0 <= number < len(STATUSES) else "UNKNOWN"
        elif name == b"grpc-message":
            call.message = unquote(value.decode("ascii", "replace"))
        elif name == b":status" and value != b"200":
            call.status, call.message = "UNKNOWN", f"the server answers with HTTP {value.decode('ascii', 'replace')}"


def _streamed_status(message: bytes) -> tuple[str, str]:
    """Status and message of a ModelStreamInferResponse, read without protobuf: error_message comes first if it is set."""
    if not message.startswith(ERROR_FIELD):
        return OK, ""
    length, shift, place = 0, 0, 1
    while place < len(message):
        byte = message[place]
        length |= (byte & 0x7F) << shift
        shift, place = shift + 7, place + 1
        if byte < 0x80:
            break
    return "UNKNOWN", message[place : place + length].decode("utf-8", "replace")


def _timeout(seconds: float) -> bytes:
    """Return a grpc-timeout value: at most eight digits and a unit."""
    for unit, per_second in ((b"n", 1e9), (b"u", 1e6), (b"m", 1e3)):
        if seconds * per_second < 1e8:
            return b"%d%s" % (max(1, round(seconds * per_second)), unit)
    return b"%dS" % min(round(seconds), 99_999_999)


Connect = Callable[[LoadEndpoint, float | None], ConnectionCalls]


def grpc_calls(target: LoadEndpoint, timeout_s: float | None) -> ConnectionCalls:
    """Open a connection for gRPC. Raises ConnectionLostError: the server does not answer, or does not speak HTTP/2."""
    connection = Http2Connection(target, timeout_s=RECONNECT_TIMEOUT_S)
    return (StreamingCalls if target.streaming else UnaryCalls)(connection, call_headers(target, timeout_s))


class ConnectionPool:
    """Connections to one server, or to all members of a cluster; opened when needed and replaced when lost."""

    def __init__(self, target: LoadEndpoint, spec: LoadSpec, connect: Connect) -> None:
        """`connect`: opens a connection to a member; it raises ConnectionLostError."""
        targets = target.each
        self._open_calls = connect
        first = spec.share[0] % len(targets)  # processes with one connection each then load different members
        self._targets = itertools.cycle(targets[first:] + targets[:first])
        self._target_count = len(targets)
        # A streaming call outlives its requests, so each request's time limit is kept on this side only.
        self._timeout_s = None if target.streaming else spec.timeout_s
        self._wanted = max(spec.connections, len(targets))
        self._concurrency = spec.concurrency or 1
        self._links: list[ConnectionCalls] = []
        self._turn = 0
        self._retry_s = 0.0
        self._alone_since_s: float | None = None
        self.given_up = False  # whether all attempts to connect have failed for too long
        self.trouble = "no connection"  # reason why the last connection was lost, or not opened

    @property
    def all(self) -> list[ConnectionCalls]:
        """Every connection, including draining ones."""
        return self._links

    @property
    def retry_s(self) -> float | None:
        """Seconds until the next attempt to connect; None if none is needed."""
        usable = any(link.connection.usable for link in self._links)
        return None if usable else max(0.0, self._retry_s - time.monotonic())

    def open(self) -> None:
        """Open the specified number of connections, and at least one to each member."""
        failures = 0
        while len(self._links) < min(self._wanted, MAX_CONNECTIONS) and failures < self._target_count:
            if not self._connect():
                failures += 1
                continue
            capacity = max(1, self._links[0].connection.max_streams)
            self._wanted = max(self._wanted, math.ceil(self._concurrency / capacity))

    def with_room(self) -> ConnectionCalls | None:
        """Return the next connection in turn that can take a request; None if all are full or lost."""
        links, behind = self._links, False
        if self._target_count > 1 and links:  # a slow member gets fewer requests, as from our clients
            self._turn = links.index(min(links, key=lambda link: len(link.in_flight))) - 1
        for _ in range(len(links)):
            self._turn = (self._turn + 1) % len(links)
            link = links[self._turn]
            if link.room > 0:
                if not link.connection.is_behind:
                    return link
                behind = True
        if behind:
            return None  # the network is the limit; another connection would not help
        usable = [link for link in links if link.connection.usable]
        if len(usable) >= MAX_CONNECTIONS or time.monotonic() < self._retry_s or not self._connect():
            return None
        return links[-1] if links[-1].room > 0 else None

    def drop(self, link: ConnectionCalls, reason: str) -> None:
        self.trouble = reason
        link.connection.close()
        self._links.remove(link)
        self._turn = 0

    def retire(self) -> None:
        """Close connections that take no more calls and have none in flight."""
        for link in [link for link in self._links if not link.connection.usable and not link.in_flight]:
            self.drop(link, "the server is stopping")

    def close(self) -> None:
        for link in self._links:
            link.connection.close()
        self._links = []

    def _connect(self) -> bool:
        target = next(self._targets)
        try:
            calls = self._open_calls(target, self._timeout_s)
        except ConnectionLostError as error:
            self.trouble = str(error)
            now_s = time.monotonic()
            self._retry_s = now_s + RETRY_S
            if not self._links:
                # Counted from the first failed attempt, not from the loss: with rare requests there are no attempts in between.
                self._alone_since_s = self._alone_since_s or now_s
                self.given_up = now_s - self._alone_since_s > GIVE_UP_S
            return False
        self._links.append(calls)
        self._alone_since_s = None
        return True
