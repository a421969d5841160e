"""Calls on one connection: each request in a call of its own, or many after another in calls that stay open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

from ngh2 import DataReceived, ResponseReceived, StreamClosed, StreamReset, TrailersReceived

from serve.benchmark.load.connection import Http2Connection
from serve.benchmark.load.order import Target

PREFIX_BYTES = 5  # of a gRPC message: compressed or not, then the length in four bytes, big-endian
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
NO_MESSAGE = "the server ended the call well, but without a message"
NO_WHOLE_MESSAGE = "the server ended the call well, but its answer is not one whole message"
# What a reset stream means for its call: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#errors
RESETS = {0x7: "UNAVAILABLE", 0x8: "CANCELLED", 0xB: "RESOURCE_EXHAUSTED", 0xC: "PERMISSION_DENIED"}

Headers = Sequence[tuple[bytes, bytes]]


class Call:
    """A request in flight.

    Attributes:
        model: which of the models it is for.
        intended_ns: when it was to be sent.
        status: by name, once it is known.
        message: what the server says about it.
        answer_bytes: that came until now, the prefix of the answer's message included.
        answer_prefix: the beginning of these, up to PREFIX_BYTES.
    """

    __slots__ = ("answer_bytes", "answer_prefix", "intended_ns", "message", "model", "status")

    def __init__(self, model: int, intended_ns: int) -> None:
        self.model = model
        self.intended_ns = intended_ns
        self.status: str | None = None
        self.message = ""
        self.answer_bytes = 0
        self.answer_prefix = b""

    def take(self, data: bytes) -> None:
        """Count a part of the answer."""
        if len(self.answer_prefix) < PREFIX_BYTES:
            self.answer_prefix += data[: PREFIX_BYTES - len(self.answer_prefix)]
        self.answer_bytes += len(data)

    def require_message(self) -> None:
        """A call that has ended well has failed all the same if its answer is not one whole message."""
        if self.status != OK:
            return
        if not self.answer_bytes:
            self.status, self.message = "INTERNAL", NO_MESSAGE
        elif self.answer_bytes != PREFIX_BYTES + int.from_bytes(self.answer_prefix[1:], "big"):
            self.status, self.message = "INTERNAL", NO_WHOLE_MESSAGE


class Calls(Protocol):
    """The calls of one connection."""

    connection: Http2Connection
    in_flight: dict[int, Call]  # by stream, the oldest first

    @property
    def room(self) -> int:
        """How many requests can be sent now."""

    def start(self, call: Call, message: bytes) -> None:
        """Send a request; `message` has its gRPC prefix."""

    def receive(self) -> list[Call]:
        """Read what is there and return the calls that have ended.

        Raises:
            ConnectionLostError: the connection is gone, and with it whatever is in flight.
        """

    def expired(self, before_ns: int) -> list[Call]:
        """Cancel and return the calls that were to be sent before a time."""


def call_headers(target: Target, timeout_s: float | None) -> list[tuple[bytes, bytes]]:
    """The headers of a call; None for one that has no deadline."""
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
    """A message with its gRPC prefix."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class UnaryCalls:
    """A call for each request."""

    def __init__(self, connection: Http2Connection, headers: Headers) -> None:
        self.connection = connection
        self.in_flight: dict[int, Call] = {}
        self._headers = headers
        self._capacity = connection.max_streams

    @property
    def room(self) -> int:
        """How many requests can be sent now."""
        return self._capacity - len(self.in_flight) if self.connection.usable else 0

    def start(self, call: Call, message: bytes) -> None:
        """Send a request."""
        http2 = self.connection.http2
        stream = http2.send_request(self._headers)
        http2.send_data(stream, message, end_stream=True)
        self.connection.unsent_bytes += len(message)
        self.in_flight[stream] = call

    def receive(self) -> list[Call]:
        """Read what is there and return the calls that have ended."""
        ended: list[Call] = []
        in_flight = self.in_flight
        event: Any  # told apart by its class, which takes mypy's way of doing so four times as long
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

    def expired(self, before_ns: int) -> list[Call]:
        """Cancel and return the calls that were to be sent before a time."""
        return list(_expired(self, before_ns))


class StreamingCalls:
    """Calls that stay open, each with one request in flight; a call whose request was answered takes the next one."""

    def __init__(self, connection: Http2Connection, headers: Headers) -> None:
        self.connection = connection
        self.in_flight: dict[int, Call] = {}
        self._headers = headers
        self._capacity = connection.max_streams
        self._idle: list[int] = []
        self._open: dict[int, bytearray] = {}  # stream -> the beginning of an answer
        self._endings: dict[int, Call] = {}  # what the trailers of a stream that ends said

    @property
    def room(self) -> int:
        """How many requests can be sent now."""
        return len(self._idle) + self._capacity - len(self._open) if self.connection.usable else 0

    def start(self, call: Call, message: bytes) -> None:
        """Send a request."""
        http2 = self.connection.http2
        if self._idle:
            stream = self._idle.pop()
        else:
            stream = http2.send_request(self._headers)
            self._open[stream] = bytearray()
        http2.send_data(stream, message)
        self.connection.unsent_bytes += len(message)
        self.in_flight[stream] = call

    def receive(self) -> list[Call]:
        """Read what is there and return the calls that have ended."""
        ended: list[Call] = []
        for event in self.connection.receive():
            if isinstance(event, DataReceived):
                ended += self._data(event)
            elif isinstance(event, StreamClosed | StreamReset):
                ended += self._gone(event.stream_id, event.error_code)
            elif isinstance(event, TrailersReceived | ResponseReceived):
                ending = self._endings.setdefault(event.stream_id, Call(0, 0))
                note_status(ending, event.headers)
            else:
                self.connection.note(event)
        return ended

    def expired(self, before_ns: int) -> list[Call]:
        """Cancel and return the calls that were to be sent before a time."""
        return list(_expired(self, before_ns))

    def _data(self, event: DataReceived) -> Iterator[Call]:
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

    def _gone(self, stream: int, code: int) -> Iterator[Call]:
        self._open.pop(stream, None)
        if stream in self._idle:
            self._idle.remove(stream)
        ending, call = self._endings.pop(stream, None), self.in_flight.pop(stream, None)
        if call is not None:
            if ending is None or ending.status in (None, OK):
                note_reset(call, code)  # a call that ends well ends no request that still waits in it
            else:
                call.status, call.message = ending.status, ending.message
            yield call


def note_reset(call: Call, code: int) -> None:
    """Take a call's status from the HTTP/2 error code with which its stream ended before any status came."""
    if code == 0:
        call.status, call.message = "UNKNOWN", NO_STATUS
    else:
        call.status, call.message = RESETS.get(code, "INTERNAL"), f"the server reset the call (HTTP/2 error {code:#x})"


def note_status(call: Call, headers: Headers) -> None:
    """Take a call's status from the headers that have one."""
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


def _expired(calls: Calls, before_ns: int) -> Iterator[Call]:
    while calls.in_flight:
        stream, call = next(iter(calls.in_flight.items()))
        if call.intended_ns > before_ns:
            return
        del calls.in_flight[stream]
        calls.connection.cancel(stream)
        call.status, call.message = "DEADLINE_EXCEEDED", "no answer in time"
        yield call


def _streamed_status(message: bytes) -> tuple[str, str]:
    """What a ModelStreamInferResponse tells, read without protobuf: its error_message comes first where it has one."""
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
    """A grpc-timeout: at most eight digits and a unit."""
    for unit, per_second in ((b"n", 1e9), (b"u", 1e6), (b"m", 1e3)):
        if seconds * per_second < 1e8:
            return b"%d%s" % (max(1, round(seconds * per_second)), unit)
    return b"%dS" % min(round(seconds), 99_999_999)
