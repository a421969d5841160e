"""Checks of HTTP/2 as gRPC uses it, with frames of our own: what clients, proxies and load balancers of other makers do."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Self

from halfserve.conformance.checks import ConformanceCheck, expect

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
INITIAL_WINDOW_SIZE = 4
UNKNOWN_FRAME = 0xFA
PATH = b"/inference.GRPCInferenceService/ServerLive"
EMPTY_MESSAGE = bytes(5)
LIVE = b"\0\0\0\0\2\x08\1"  # the flag of an uncompressed message, its length, and `live: true`
SECONDS = 10.0
RFC, GRPC = "RFC 9113, ", "gRPC over HTTP/2: "
Frame = tuple[int, int, int, bytes]  # type, flags, stream, payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header field that HPACK neither indexes nor compresses."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


REQUEST = b"".join(
    _literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PATH),
        (b":authority", b"conformance"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)


class Http2Connection:
    """A connection that sends frames as they are given."""

    def __init__(self, host: str, port: int, settings: dict[int, int] | None = None) -> None:
        self._socket = socket.create_connection((host, port), timeout=SECONDS)
        self._socket.sendall(PREFACE)
        self.send(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in (settings or {}).items()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()

    def send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Send one frame."""
        self._socket.sendall(len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload)

    def call(self, stream: int) -> None:
        """Send a whole call of ServerLive."""
        self.send(HEADERS, END_HEADERS, stream, REQUEST)
        self.send(DATA, END_STREAM, stream, EMPTY_MESSAGE)

    def frames(self) -> Iterator[Frame]:
        """Yield frames until the server closes the connection; settings are acknowledged."""
        while head := self._exactly(9):
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            payload = self._exactly(length)
            if kind == SETTINGS and not flags & ACK:
                self.send(SETTINGS, ACK, 0, b"")
            yield kind, flags, int.from_bytes(head[5:9], "big"), payload

    def until(self, wanted: Callable[[Frame], bool], expected: str) -> list[Frame]:
        """Return the frames up to the first that is wanted."""
        seen: list[Frame] = []
        end: object = "the end of the connection"
        try:
            for frame in self.frames():
                seen.append(frame)
                if wanted(frame):
                    return seen
        except (TimeoutError, ConnectionError) as error:
            end = error
        expect(False, expected, f"{end} after frames {[frame[:3] for frame in seen]}")
        return seen

    def answered(self, stream: int) -> list[Frame]:
        """Return the frames up to the end of a call, which ends with trailers."""

        def ends(frame: Frame) -> bool:
            return frame[2] == stream and (
                frame[0] == RST_STREAM or bool(frame[0] in (HEADERS, DATA) and frame[1] & END_STREAM)
            )

        seen = self.until(ends, f"an answer on stream {stream}")
        expect(seen[-1][0] == HEADERS, "trailers at the answer's end", f"a frame of type {seen[-1][0]}")
        message = b"".join(frame[3] for frame in seen if frame[0] == DATA and frame[2] == stream)
        expect(message == LIVE, "the message that the server is live", message or "none")
        return seen

    def _exactly(self, count: int) -> bytes:
        held = b""
        while len(held) < count:
            part = self._socket.recv(count - len(held))
            if not part:
                return b""
            held += part
        return held


def http2_checks(host: str, port: int) -> Iterator[ConformanceCheck]:
    """Yield the checks, each with connections of its own."""
    for name, (clause, function) in CHECKS.items():

        def run(function: Callable[[str, int], None] = function) -> None:
            function(host, port)

        yield ConformanceCheck(name=f"http2.{name}", clause=clause, run=run)


def _settings(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        first = next(connection.frames())
        expect(first[0] == SETTINGS and not first[1] & ACK, "SETTINGS as the first frame", f"a frame of type {first[0]}")
        connection.until(lambda frame: frame[0] == SETTINGS and bool(frame[1] & ACK), "an acknowledgement of our SETTINGS")


def _ping(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.send(PING, 0, 0, b"12345678")
        seen = connection.until(lambda frame: frame[0] == PING, "an answer to PING")
        expect(seen[-1][1] & ACK and seen[-1][3] == b"12345678", "the same bytes with ACK", seen[-1])


def _unknown_frame(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.send(UNKNOWN_FRAME, 0xFF, 0, b"unknown")
        connection.call(1)
        connection.answered(1)


def _continuation(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.send(HEADERS, 0, 1, REQUEST[:20])
        connection.send(CONTINUATION, 0, 1, REQUEST[20:50])
        connection.send(CONTINUATION, END_HEADERS, 1, REQUEST[50:])
        connection.send(DATA, END_STREAM, 1, EMPTY_MESSAGE)
        connection.answered(1)


def _padding(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.send(HEADERS, END_HEADERS | PADDED, 1, b"\x07" + REQUEST + bytes(7))
        connection.send(DATA, END_STREAM | PADDED, 1, b"\x09" + EMPTY_MESSAGE + bytes(9))
        connection.answered(1)


def _cut_message(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.send(HEADERS, END_HEADERS, 1, REQUEST)
        for byte in EMPTY_MESSAGE:
            connection.send(DATA, 0, 1, bytes([byte]))
        connection.send(DATA, END_STREAM, 1, b"")
        connection.answered(1)


def _streams(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        for stream in (1, 3):
            connection.send(HEADERS, END_HEADERS, stream, REQUEST)
        connection.send(DATA, END_STREAM, 3, EMPTY_MESSAGE)
        connection.answered(3)
        connection.send(DATA, END_STREAM, 1, EMPTY_MESSAGE)
        connection.answered(1)


def _reset(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.send(HEADERS, END_HEADERS, 1, REQUEST)
        connection.send(RST_STREAM, 0, 1, (8).to_bytes(4, "big"))
        connection.call(3)
        connection.answered(3)


def _flow_control(host: str, port: int) -> None:
    with Http2Connection(host, port, {INITIAL_WINDOW_SIZE: 0}) as connection:
        connection.call(1)
        connection.send(PING, 0, 0, b"barrier.")
        seen = connection.until(lambda frame: frame[0] == PING and bool(frame[1] & ACK), "an answer to PING")
        expect(not any(f[0] == DATA and f[3] for f in seen), "no DATA while the window is 0", [frame[:3] for frame in seen])
        connection.send(WINDOW_UPDATE, 0, 1, (65535).to_bytes(4, "big"))
        connection.answered(1)


def _bad_frame(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.send(PING, 0, 0, b"1234567")  # a PING has 8 bytes
        try:
            for _ in connection.frames():  # GOAWAY should be the last
                pass
        except ConnectionError:  # a reset ends the connection too
            pass
    _ping(host, port)


def _content_type(host: str, port: int) -> None:
    with Http2Connection(host, port) as connection:
        connection.call(1)
        kinds = [frame[0] for frame in connection.answered(1) if frame[2] == 1]
        expect(kinds[0] == HEADERS, "headers, the message and trailers", kinds)


CHECKS: dict[str, tuple[str, Callable[[str, int], None]]] = {
    "settings": (RFC + "3.4 and 6.5.3: SETTINGS first, acknowledged", _settings),
    "ping": (RFC + "6.7: PING is answered", _ping),
    "unknown_frame": (RFC + "5.5: frames of unknown types are ignored", _unknown_frame),
    "continuation": (RFC + "6.10: CONTINUATION", _continuation),
    "padding": (RFC + "6.1 and 6.2: padding", _padding),
    "flow_control": (RFC + "6.9.2: a window of 0", _flow_control),
    "two_streams": (RFC + "5.1.2: concurrent streams", _streams),
    "reset": (RFC + "5.4.2: a reset ends its stream alone", _reset),
    "frame_size_error": (RFC + "4.2: a PING of another size ends the connection, and no other", _bad_frame),
    "cut_message": (GRPC + "a message in several DATA frames", _cut_message),
    "answer": (GRPC + "headers, length-prefixed message, trailers", _content_type),
}
