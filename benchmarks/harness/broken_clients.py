"""Clients that disconnect in the middle of a message."""

from __future__ import annotations

import contextlib
import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4
INFER = b"/inference.GRPCInferenceService/ModelInfer"
ANNOUNCED_BYTES = 1_000_000  # announced size of a message that is sent only in part
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


def hang_up_in_a_message(address: str) -> None:
    """Begin a call, send a part of its message, and reset the connection."""
    with contextlib.suppress(ConnectionError), connected(address) as connection:
        message = b"\0" + struct.pack(">I", ANNOUNCED_BYTES) + bytes(1000)
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, call_block()))
        connection.sendall(frame(DATA, 0, 1, message))
        connection.recv(1)  # the server has taken the connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)


def talk_nonsense(address: str, nonsense: bytes) -> None:
    """Send bytes that are not HTTP/2, and wait for the server to disconnect."""
    with contextlib.suppress(ConnectionError), connected(address) as connection:
        connection.sendall(nonsense)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def connected(address: str) -> socket.socket:
    """Connect to HOST:PORT, with a timeout."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_block(path: bytes = INFER) -> bytes:
    """The headers of a call, each a literal that is not indexed (RFC 7541, section 6.2.2)."""
    pairs = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    return b"".join(b"\0" + bytes([len(key)]) + key + bytes([len(value)]) + value for key, value in pairs.items())
