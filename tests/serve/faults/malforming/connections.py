"""Connections that break HTTP/2, built by hand: the server must report the broken rule, and close the connection.

The expected codes are those that RFC 9113 gives for each fault. PROTOCOL_ERROR is always right, because sections 5.4 and 7 let
the server be less specific.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.http2_frames import (
    DATA,
    END_HEADERS,
    HEADERS,
    PREFACE,
    SETTINGS,
    call_block,
    connected,
    frame,
)

PRIORITY, RST_STREAM, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 2, 3, 5, 6, 7, 8, 9
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 1, 3, 6, 9, 11
STREAM_CLOSED = 5
ACK = 1
HEAD_BYTES = 9
GREETING = PREFACE + frame(SETTINGS, 0, 0, b"")
CLOSED = -1  # the connection ended without an error code


@dataclass(frozen=True)
class Fault:
    """Bytes of a client that break a rule.

    Attributes:
        codes: error codes that the server may send in GOAWAY or RST_STREAM; CLOSED if it may just close the connection.
    """

    kind: str
    data: bytes  # all bytes from the connection's start
    codes: frozenset[int]

    def complaint(self, address: str) -> str:
        """Send the bytes; returns the fault of the server's reaction, "" if it is right."""
        with connected(address) as connection:
            try:
                connection.sendall(self.data)
                code = _verdict(connection)
            except ConnectionError:
                code = CLOSED
            except TimeoutError:
                return f"no reaction to {self.data[:60].hex()}"
        allowed = self.codes | {PROTOCOL_ERROR}
        return "" if code in allowed else f"HTTP/2 error {code}, expected one of {sorted(allowed)}"


def _fault(kind: str, data: bytes, *codes: int) -> Fault:
    return Fault(kind, GREETING + data, frozenset(codes))


def no_preface(chance: random.Random) -> Fault:
    data = chance.choice(
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", chance.randbytes(64), PREFACE[:-1] + b"X", b"\x16\x03\x01" + bytes(200)]
    )
    return Fault("no HTTP/2", data, frozenset({CLOSED}))


def wrong_size(chance: random.Random) -> Fault:
    """Frames whose type has a fixed size, with another size."""
    payload = chance.randbytes(chance.choice([1, 3, 7, 9]))
    kind, stream = chance.choice([(PING, 0), (WINDOW_UPDATE, 0), (SETTINGS, 0), (RST_STREAM, 1), (PRIORITY, 1)])
    opening = frame(HEADERS, END_HEADERS, 1, call_block()) if stream else b""
    return _fault("frame sizes", opening + frame(kind, 0, stream, payload), FRAME_SIZE_ERROR)


def too_large(chance: random.Random) -> Fault:
    """A frame larger than the server's limit."""
    head = struct.pack(">I", chance.choice([2**24 - 1, 2**20 + 1]))[1:] + bytes([DATA, 0]) + struct.pack(">I", 1)
    return _fault("frame too large", frame(HEADERS, END_HEADERS, 1, call_block()) + head + bytes(64), FRAME_SIZE_ERROR)


def chosen(kind: str, codes: Sequence[int], bytes_of_client: Sequence[bytes], chance: random.Random) -> Fault:
    return _fault(kind, chance.choice(bytes_of_client), *codes)


def header_flood(chance: random.Random) -> Fault:
    """Headers over the server's limit: it may answer 431, reset the call or close the connection."""
    block = call_block() + b"".join(_literal(b"x-%d" % number, b"y" * 100) for number in range(300))
    parts = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    more = [frame(CONTINUATION, END_HEADERS if part is parts[-1] else 0, 1, part) for part in parts[1:]]
    endless = [frame(CONTINUATION, 0, 1, _literal(b"x", b"y" * 8000))] * 40
    data = frame(HEADERS, 0, 1, parts[0]) + b"".join(more if chance.random() < 0.5 else endless)
    return _fault("header flood", data, ENHANCE_YOUR_CALM, CLOSED, 0, 2)


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed (RFC 7541, section 6.2.2)."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    """An integer with a prefix of seven bits (RFC 7541, section 5.1)."""
    if number < 0x7F:
        return bytes([number])
    encoded, rest = bytearray([0x7F]), number - 0x7F
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*encoded, rest])


def _verdict(connection: socket.socket) -> int:
    """The error code of the first GOAWAY or RST_STREAM; CLOSED if the connection ends without one."""
    held = b""
    while True:
        piece = connection.recv(65_536)
        if not piece:
            return CLOSED
        held += piece
        while len(held) >= HEAD_BYTES and len(held) >= HEAD_BYTES + int.from_bytes(held[:3], "big"):
            end = HEAD_BYTES + int.from_bytes(held[:3], "big")
            kind, payload, held = held[3], held[HEAD_BYTES:end], held[end:]
            if kind == GOAWAY:
                return int.from_bytes(payload[4:8], "big")
            if kind == RST_STREAM:
                return int.from_bytes(payload[:4], "big")


OPEN, BLOCK = END_HEADERS | 1, call_block()
# Kinds of faults, the allowed codes, and what breaks the rule.
FAULTS: tuple[tuple[str, Sequence[int], Sequence[bytes]], ...] = (
    (
        "wrong stream",  # frames on streams where they are not allowed
        [STREAM_CLOSED],
        [
            frame(DATA, 0, 0, b"x"),
            frame(DATA, 0, 5, b"x"),
            frame(HEADERS, END_HEADERS, 0, BLOCK),
            frame(HEADERS, END_HEADERS, 2, BLOCK),
            frame(SETTINGS, 0, 1, b""),
            frame(PING, 0, 3, bytes(8)),
            frame(RST_STREAM, 0, 9, bytes(4)),
            frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4) + BLOCK),
        ],
    ),
    (
        "wrong values",  # settings and windows out of range, and an acknowledgement with a payload
        [FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR],
        [
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)),
            frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 100)),
            frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 2)),
            frame(SETTINGS, ACK, 0, bytes(6)),
            frame(WINDOW_UPDATE, 0, 0, bytes(4)),
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)),
        ],
    ),
    (
        "header blocks",  # that do not decompress, or are interrupted
        [COMPRESSION_ERROR],
        [
            frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
            frame(HEADERS, END_HEADERS, 1, b"\xbe" + BLOCK),
            frame(HEADERS, END_HEADERS, 1, BLOCK[:-3]),
            frame(CONTINUATION, END_HEADERS, 1, BLOCK),
            frame(HEADERS, 0, 1, BLOCK) + frame(PING, 0, 0, bytes(8)),
            frame(HEADERS, 0, 1, BLOCK) + frame(HEADERS, END_HEADERS, 3, BLOCK),
        ],
    ),
    (
        "forbidden headers",  # or without required ones
        [],
        [
            frame(HEADERS, OPEN, 1, headers)
            for headers in (
                BLOCK + _literal(b"Upper", b"x"),
                BLOCK + _literal(b":path", b"/late"),
                BLOCK + _literal(b"connection", b"close"),
                BLOCK + _literal(b"a\nb", b"x"),
                BLOCK + _literal(b":status", b"200"),
                _literal(b":method", b"POST") + _literal(b":scheme", b"http"),
                BLOCK + _literal(b"content-length", b"nine"),
            )
        ],
    ),
)
MAKERS: tuple[Callable[[random.Random], Fault], ...] = (
    *(no_preface, wrong_size, too_large, header_flood),
    *(partial(chosen, *fault) for fault in FAULTS),
)
