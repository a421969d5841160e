"""Frames of calls that are written by hand, on streams that the client of a scene knows nothing of."""

from __future__ import annotations

from serve.transports.nghttp2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    RST_STREAM,
    head_of,
)
from serve.transports.nghttp2.hpack_blocks import literals
from tests.serve.transports.nghttp2.connection_scene import Scene

FIRST = 101  # a stream that the client does not know of
FIELD = literals([(b"a", b"b")])


def begin(scene: Scene, stream: int = FIRST) -> bytes:
    return raw(HEADERS, END_HEADERS, stream, scene.block)


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return head_of(kind, flags, stream, len(payload)) + payload


def data(payload: bytes, flags: int = END_STREAM, stream: int = FIRST) -> bytes:
    return raw(DATA, flags, stream, payload)


def ends(scene: Scene) -> list[tuple[str, int]]:
    """What was ended, and how: calls answered and reset, and the connection."""
    names = {HEADERS: "answered", RST_STREAM: "reset", GOAWAY: "connection"}
    return [
        (names[kind], stream) for kind, flags, stream, _ in scene.frames() if kind in names and (kind != HEADERS or flags & 1)
    ]
