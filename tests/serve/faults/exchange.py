"""Low-level calls over one HTTP/2 connection, many in flight: with any headers and bytes, and complete answers."""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ngh2 import DataReceived, Event, ResponseReceived, StreamClosed, StreamReset, TrailersReceived

from halfserve.serve.benchmark.load.http2_connection import ConnectionLostError, Http2Connection
from halfserve.serve.benchmark.load.spec import LoadEndpoint
from tests.serve.running_server import WAIT_S

T = TypeVar("T")
Headers = Sequence[tuple[bytes, bytes]]
INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
PREFIX_BYTES = 5  # prefix of a gRPC message: a compression flag, then the length in four bytes, big-endian
READ_S = 0.5


def call_headers(path: str, *extra: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"localhost")]
    return [*pseudo, (b"te", b"trailers"), (b"content-type", b"application/grpc"), *extra]


def messages_in(body: bytes) -> list[bytes]:
    found, position = [], 0
    while position < len(body):
        end = position + PREFIX_BYTES + int.from_bytes(body[position + 1 : position + PREFIX_BYTES], "big")
        if body[position] or end > len(body):
            raise ValueError(f"{len(body) - position} bytes at the answer's end are no message")
        found.append(body[position + PREFIX_BYTES : end])
        position = end
    return found


@dataclass
class Answer:
    http: int = 0  # HTTP status; 0 if none came
    code: int | None = None  # gRPC status; None if none came
    text: str = ""  # the grpc-message header as sent
    body: bytes = b""
    reset: int | None = None  # HTTP/2 error code that ended the stream; None if it ended normally
    pieces: list[bytes] = field(default_factory=list)

    def take_headers(self, headers: Headers) -> None:
        for name, value in headers:
            if name == b":status":
                self.http = int(value)
            elif name == b"grpc-status":
                self.code = int(value)
            elif name == b"grpc-message":
                self.text = value.decode()


class Exchange(Generic[T]):
    """One connection. Each call carries a tag, which is returned with its answer.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = Http2Connection(LoadEndpoint(host=host, port=int(port), path=INFER_PATH))
        self._open: dict[int, tuple[T, Answer]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def fileno(self) -> int:
        return self._connection.fileno()

    def start(self, tag: T, headers: Headers, data: bytes, *, end: bool = True) -> None:
        """Begin a call with all of its data; without `end` the client then stays silent, as if more data were to come."""
        http2 = self._connection.http2
        if data or not end:
            stream = http2.send_request(headers)
            http2.send_data(stream, data, end_stream=end)
        else:
            stream = http2.send_request(headers, end_stream=True)
        self._open[stream] = tag, Answer()

    def flush(self) -> None:
        self._connection.flush()

    def answers(self) -> list[tuple[T, Answer]]:
        """Read the available data; returns the calls that have ended."""
        ended = []
        event: Any
        for event in self._connection.receive():
            kind = type(event)
            if kind is StreamClosed or kind is StreamReset:
                pair = self._open.pop(event.stream_id, None)
                if pair is not None:
                    ended.append(_ended(pair, event))
            elif kind is DataReceived:
                self._open[event.stream_id][1].pieces.append(event.data)
            elif kind is TrailersReceived or kind is ResponseReceived:
                self._open[event.stream_id][1].take_headers(event.headers)
        return ended

    def wait(self) -> list[tuple[T, Answer]]:
        done: list[tuple[T, Answer]] = []
        until = time.monotonic() + WAIT_S
        while self._open:
            done += turn([self])
            if time.monotonic() > until:
                raise ConnectionLostError(f"{len(self._open)} calls got no answer within {WAIT_S:g} s")
        return done

    def close(self) -> None:
        self._connection.close()


def turn(exchanges: Iterable[Exchange[T]]) -> list[tuple[T, Answer]]:
    """Write to all connections, wait until one is readable, and read; returns the calls that have ended."""
    exchanges = list(exchanges)
    for exchange in exchanges:
        exchange.flush()
    ready, _, _ = select.select(exchanges, [], [], READ_S)
    return [pair for exchange in ready for pair in exchange.answers()]


def _ended(pair: tuple[T, Answer], event: Event) -> tuple[T, Answer]:
    answer = pair[1]
    answer.body = answer.pieces[0] if len(answer.pieces) == 1 else b"".join(answer.pieces)
    answer.pieces = []
    code = getattr(event, "error_code", 0)
    answer.reset = code if code and answer.code is None else None
    return pair
