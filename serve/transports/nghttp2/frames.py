"""HTTP/2 frames and header blocks as bytes, for traffic that does not go through libnghttp2.

https://www.rfc-editor.org/rfc/rfc9113 (sections 4.1 and 6), https://www.rfc-editor.org/rfc/rfc7541 (sections 5 and 6).
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

DATA, HEADERS, RST_STREAM, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0x0, 0x1, 0x3, 0x7, 0x8, 0x9
PRIORITY_FRAME, PRIORITY_BYTES = 0x2, 5
HINTS = frozenset({PRIORITY_FRAME, 0x10})  # stream priorities, which this server ignores
END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x01, 0x04, 0x08, 0x20
NO_ERROR, ENHANCE_YOUR_CALM = 0x0, 0xB
HEADER_TABLE_SIZE, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 1, 3, 4, 5, 6

FRAME_BYTES = 2**20  # of a received frame: fewer, larger frames for large tensors
PREFACE_BYTES = 24  # of the client connection preface
# Before the first SETTINGS.
DEFAULT_TABLE_BYTES, DEFAULT_WINDOW_BYTES, DEFAULT_FRAME_BYTES = 4096, 65_535, 16_384
MAX_STREAM = MAX_WINDOW_BYTES = 2**31 - 1

HEAD = Struct(">IBI")  # 24 bits of the payload's length and 8 of the type, then flags, then the stream
HEAD_BYTES = HEAD.size
NUMBER = Struct(">I")
_WITH_NUMBER = Struct(">IBII")
LENGTH_BYTES = 3
_GOAWAY = HEAD.pack(GOAWAY, 0, 0)[LENGTH_BYTES:]
INDEXED, INSERTS, RESIZES = 0x80, 0x40, 0x20
# Of HPACK's static table (RFC 7541, appendix A).
STATUS_200, METHOD_POST, SCHEME_HTTP, PATH_ROOT = (bytes([INDEXED | place]) for place in (8, 3, 6, 4))
# Names of that table; the value follows.
AUTHORITY, CONTENT_TYPE = bytes([1]), bytes([0x0F, 31 - 0x0F])


def head_of(kind: int, flags: int, stream: int, length: int) -> bytes:
    """The head of a frame with `length` bytes of payload."""
    return HEAD.pack(length << 8 | kind, flags, stream)


def window_update(stream: int, size: int) -> bytes:
    """A WINDOW_UPDATE of 1 to MAX_WINDOW_BYTES; stream 0 is the connection."""
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
    """A string literal (RFC 7541, section 5.2)."""
    return _integer(len(value), 7) + value


def literals(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Fields without indexing (RFC 7541, section 6.2.2)."""
    return b"".join(b"\0" + literal(name) + literal(value) for name, value in headers)


def repeats(block: bytes) -> bool:
    """Whether a header block decodes the same when repeated, because it leaves the dynamic table unchanged.

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
    """The place after an integer."""
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
