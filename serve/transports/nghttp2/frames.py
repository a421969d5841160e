"""HTTP/2's frames as bytes, for what is read and written without libnghttp2.

https://www.rfc-editor.org/rfc/rfc9113, sections 4.1 and 6.
"""

from __future__ import annotations

from struct import Struct

DATA, HEADERS, RST_STREAM, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0x0, 0x1, 0x3, 0x7, 0x8, 0x9
PRIORITY_FRAME, PRIORITY_BYTES = 0x2, 5
HINTS = frozenset({PRIORITY_FRAME, 0x10})  # which streams a client would have answered first; nothing here goes by them
END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x01, 0x04, 0x08, 0x20
NO_ERROR, ENHANCE_YOUR_CALM = 0x0, 0xB
HEADER_TABLE_SIZE, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 1, 3, 4, 5, 6

FRAME_BYTES = 2**20  # that a client may send: fewer, larger frames for large tensors
PREFACE_BYTES = 24  # what a client says before its first frame
# Until the other side's settings say otherwise.
DEFAULT_TABLE_BYTES, DEFAULT_WINDOW_BYTES, DEFAULT_FRAME_BYTES = 4096, 65_535, 16_384
MAX_STREAM = MAX_WINDOW_BYTES = 2**31 - 1

HEAD = Struct(">IBI")  # 24 bits of the payload's length and 8 of the type, then flags, then the stream
HEAD_BYTES = HEAD.size
NUMBER = Struct(">I")
_WITH_NUMBER = Struct(">IBII")
LENGTH_BYTES = 3
_GOAWAY = HEAD.pack(GOAWAY, 0, 0)[LENGTH_BYTES:]


def head_of(kind: int, flags: int, stream: int, length: int) -> bytes:
    """What a frame begins with; `length` bytes of payload follow."""
    return HEAD.pack(length << 8 | kind, flags, stream)


def window_update(stream: int, size: int) -> bytes:
    """The other side may send `size` bytes more, 1 to MAX_WINDOW_BYTES; stream 0 is the whole connection."""
    return _WITH_NUMBER.pack(NUMBER.size << 8 | WINDOW_UPDATE, 0, stream, size)


def rst_stream(stream: int, code: int) -> bytes:
    """The end of a stream, on both sides."""
    return _WITH_NUMBER.pack(NUMBER.size << 8 | RST_STREAM, 0, stream, code)


def goaway(stream: int, code: int) -> bytes:
    """The end of a connection; `stream` is the last one that was looked at."""
    return head_of(GOAWAY, 0, 0, 2 * NUMBER.size) + NUMBER.pack(stream) + NUMBER.pack(code)


def with_last_stream(frames: bytes, stream: int) -> bytes:
    """The same bytes; where the frame that they end with is a GOAWAY, it names `stream` as the last one that was looked at."""
    at = frames.rfind(_GOAWAY) - LENGTH_BYTES
    if at < 0 or at + HEAD_BYTES + int.from_bytes(frames[at : at + LENGTH_BYTES]) != len(frames):
        return frames
    last = at + HEAD_BYTES
    return frames[:last] + NUMBER.pack(stream) + frames[last + NUMBER.size :]
