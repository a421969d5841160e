"""Bytes of HTTP/2 by hand, for clients that break its rules or go silent."""

from __future__ import annotations

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4
INFER = b"/inference.GRPCInferenceService/ModelInfer"


def connected(address: str) -> socket.socket:
    """Connect to HOST:PORT, with a timeout."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def call_block(path: bytes = INFER) -> bytes:
    """Return the headers of a call, each a literal that is not indexed (RFC 7541, section 6.2.2)."""
    pairs = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    return b"".join(b"\0" + bytes([len(key)]) + key + bytes([len(value)]) + value for key, value in pairs.items())
