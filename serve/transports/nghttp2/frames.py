"""HTTP/2 frames and header blocks as bytes, for traffic that does not go through libnghttp2.

https://www.rfc-editor.org/rfc/rfc9113 (sections 4.1 and 6), https://www.rfc-editor.org/rfc/rfc7541 (sections 5 and 6).
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

DATA: Final = 0x0
HEADERS: Final = 0x1
RST_STREAM: Final = 0x3
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9
PRIORITY_FRAME: Final = 0x2
PRIORITY_BYTES: Final = 5
HINTS: Final = frozenset({PRIORITY_FRAME, 0x10})  # stream priorities, which this server ignores
END_STREAM: Final = 0x01
END_HEADERS: Final = 0x04
PADDED: Final = 0x08
PRIORITY: Final = 0x20
NO_ERROR: Final = 0x0
ENHANCE_YOUR_CALM: Final = 0xB
HEADER_TABLE_SIZE: Final = 1
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

FRAME_BYTES: Final = 2**20  # of a received frame: fewer, larger frames for large tensors
PREFACE_BYTES: Final = 24  # length of the client connection preface
# Before the first SETTINGS.
DEFAULT_TABLE_BYTES: Final = 4096
DEFAULT_WINDOW_BYTES: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
MAX_STREAM: Final = 2**31 - 1
MAX_WINDOW_BYTES: Final = 2**31 - 1

HEAD: Final = Struct(">IBI")  # 24 bits of the payload's length and 8 of the type, then flags, then the stream
HEAD_BYTES: Final = 9
NUMBER: Final = Struct(">I")
_WITH_NUMBER: Final = Struct(">IBII")
LENGTH_BYTES: Final = 3
_GOAWAY: Final = HEAD.pack(GOAWAY, 0, 0)[LENGTH_BYTES:]
INDEXED: Final = 0x80
INSERTS: Final = 0x40
RESIZES: Final = 0x20
# Of HPACK's static table (RFC 7541, appendix A).
STATUS_200, METHOD_POST, SCHEME_HTTP, PATH_ROOT = (bytes([INDEXED | place]) for place in (8, 3, 6, 4))
# Names of that table; the value follows.
AUTHORITY, CONTENT_TYPE = bytes([1]), bytes([0x0F, 31 - 0x0F])


def head_of(kind: int, flags: int, stream: int, length: int) -> bytes:
    """Return the head of a frame with `length` bytes of payload."""
    return HEAD.pack(length << 8 | kind, flags, stream)


def window_update(stream: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE of 1 to MAX_WINDOW_BYTES; stream 0 is the connection."""
    return _WITH_NUMBER.pack(NUMBER.size << 8 | WINDOW_UPDATE, 0, stream, size)


def rst_stream(stream: int, code: int) -> bytes:
    return _WITH_NUMBER.pack(NUMBER.size << 8 | RST_STREAM, 0, stream, code)


def goaway(stream: int, code: int) -> bytes:
    """`stream` is the last one processed."""
    return head_of(GOAWAY, 0, 0, 2 * NUMBER.size) + NUMBER.pack(stream) + NUMBER.pack(code)


def with_last_stream(frames: bytes, stream: int) -> bytes:
    """Replace the last-stream field of a GOAWAY at the end of `frames`; other bytes are returned unchanged."""
    at = frames.rfind(_GOAWAY) - LENGTH_BYTES
    if at < 0 or at + HEAD_BYTES + int.from_bytes(frames[at : at + LENGTH_BYTES]) != len(frames):
        return frames
    last = at + HEAD_BYTES
    return frames[:last] + NUMBER.pack(stream) + frames[last + NUMBER.size :]


def literal(value: bytes) -> bytes:
    """Return a string literal (RFC 7541, section 5.2)."""
    return _integer(len(value), 7) + value


def literals(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Fields without indexing (RFC 7541, section 6.2.2)."""
    return b"".join(b"\0" + literal(name) + literal(value) for name, value in headers)


def repeats(block: bytes) -> bool:
    """Return whether a header block decodes the same when repeated, because it leaves the dynamic table unchanged.

    Malformed blocks do not; libnghttp2 rejects them.
    """
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & INDEXED:
                at = _after_integer(block, at, 7)
            elif first & (INSERTS | RESIZES):
                return False
            else:
                has_name = first & 0x0F
                at = _after_integer(block, at, 4)
                if not has_name:
                    at = _after_string(block, at)
                at = _after_string(block, at)
    except IndexError:
        return False
    return at == len(block)


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    encoded, value = [most], value - most
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _after_integer(block: bytes, at: int, bits: int) -> int:
    """Return the place after an integer."""
    most = (1 << bits) - 1
    if block[at] & most == most:
        at += 1
        while block[at] & 0x80:
            at += 1
    return at + 1


def _after_string(block: bytes, at: int) -> int:
    end = _after_integer(block, at, 7)
    length = block[at] & 0x7F
    for place, byte in enumerate(block[at + 1 : end]):
        length += (byte & 0x7F) << 7 * place
    return end + length
