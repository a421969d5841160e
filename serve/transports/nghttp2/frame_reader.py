"""Splits received bytes into frames: the fast path reads those of its calls, libnghttp2 all others.

libnghttp2 gets its frames as received, many at a time. It is never left inside a frame while calls may be handed over to it: a
DATA frame that arrives in pieces is passed on as several smaller DATA frames.
"""

from __future__ import annotations

from typing import Final, Protocol

from ngh2.exceptions import DenialOfServiceError

from halfserve.serve.transports.grpc_framing import PREFIX, PREFIX_BYTES
from halfserve.serve.transports.nghttp2.fast_path import CallTemplate, FastPath
from halfserve.serve.transports.nghttp2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    HINTS,
    MAX_STREAM,
    NUMBER,
    PADDED,
    PREFACE_BYTES,
    PRIORITY_BYTES,
    PRIORITY_FRAME,
    RST_STREAM,
    WINDOW_UPDATE,
    head_of,
)

FRAMES_A_TURN: Final = 512  # limit per connection and loop iteration; a call has two to four
# Encoded header bytes that libnghttp2 decodes per iteration: one byte can be a field. A usual call has 50 to 250.
HEADER_BYTES_A_TURN: Final = 4096
MAX_WAIT_BYTES: Final = 16_384  # largest frame that is buffered until it is complete
WINDOW_UPDATE_HEAD: Final = 4 << 8 | WINDOW_UPDATE
RST_STREAM_HEAD: Final = 4 << 8 | RST_STREAM
HEADER_FRAMES: Final = frozenset({HEADERS, CONTINUATION})
LARGE_BYTES: Final = 16_384  # smallest input that is parsed without a copy
MIN_RUN_BYTES: Final = 4096  # smallest input whose frames are taken many at a time

Bytes = bytes | memoryview


class FrameHandler(Protocol):
    """The owner of libnghttp2."""

    def feed(self, data: Bytes) -> None: ...  # hand bytes to libnghttp2, and its events to their calls

    def template_of(self, stream: int) -> CallTemplate | None:
        """Return the template of a call that libnghttp2 just opened, if the fast path can open others like it."""

    def explain(self, stream: int) -> None: ...  # answer a call whose headers make libnghttp2 reset it


class FrameReader:
    __slots__ = ("_block_bytes", "_calls", "_flags", "_has_more", "_left", "_max_block_bytes", "_rest", "_stream")

    def __init__(self, calls: FastPath, max_block_bytes: int) -> None:
        """`max_block_bytes` limits one encoded header list."""
        self._calls = calls
        self._max_block_bytes = max_block_bytes
        self._block_bytes = 0  # size of the latest header list, which CONTINUATION may extend
        self._rest = b""  # an incomplete frame, or frames left for a later iteration
        self._has_more = False  # in _rest
        self._left = PREFACE_BYTES  # bytes missing of a frame that is passed on in pieces
        self._stream, self._flags = 0, 0  # stream and flags of that DATA frame; stream 0 if libnghttp2 gets it unchanged

    def read(self, data: Bytes, handler: FrameHandler) -> bool:
        """Read received bytes.

        Returns:
            Whether some are left, to be read by another call without data.

        Raises:
            NGH2Error: the connection cannot continue.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        data = bytes(data) if len(data) < LARGE_BYTES else memoryview(data)
        self._has_more = False
        at = self._frames(data, self._continue_frame(data, handler) if self._left else 0, handler)
        self._rest = bytes(data[at:]) if at < len(data) else b""
        return self._has_more

    def keep(self, data: Bytes) -> None:
        """Buffer bytes for a later `read`."""
        self._rest += data

    def _frames(self, data: Bytes, at: int, handler: FrameHandler) -> int:  # noqa: C901, PLR0912, PLR0915  (hot: function calls cost too much)
        """Read frames from `at` on; returns the end of the last one."""
        calls, feed, read_head, read_prefix = self._calls, handler.feed, HEAD.unpack_from, PREFIX.unpack_from
        requests, templates = calls.requests, calls.templates
        # Declared, as compiled code would take what struct returns for objects of any type.
        head: int
        flags: int
        stream: int
        flag: int
        length: int
        own = data if isinstance(data, bytes) else None  # slices of bytes alone are compiled to one call
        expecting, growing, announced, max_whole = requests.calls, requests.growing, requests.announced, requests.max_whole
        size, passed = len(data), at  # bytes from `passed` to `at` are libnghttp2's, not handed over yet
        header_bytes = 0
        for _ in range(FRAMES_A_TURN):
            body = at + HEAD_BYTES
            if body > size:
                break
            head, flags, stream = read_head(data, at)
            stream &= MAX_STREAM  # without the reserved bit
            end = body + (head >> 8)
            kind = head & 0xFF
            is_ours = False
            if kind == DATA:
                call = expecting.get(stream) if flags == END_STREAM and end <= size and end - body >= PREFIX_BYTES else None
                flag, length = read_prefix(data, body) if call is not None else (1, 0)
                if (
                    call is not None
                    and not flag
                    and length == end - body - PREFIX_BYTES
                    and end - body <= max_whole
                    and not (growing and stream in growing)
                    and (not announced or announced.get(stream, end - body) == end - body)
                ):
                    requests.owed += end - body
                    if announced:
                        announced.pop(stream, None)
                    del expecting[stream]
                    at_message = body + PREFIX_BYTES
                    call.take(bytes(data[at_message:end]) if own is None else own[at_message:end])
                    is_ours = True
                else:
                    is_ours = self._data(data, body, end, flags, stream)
                    if is_ours and not flags and end - body >= MIN_RUN_BYTES and end < size and stream in growing:
                        end = requests.take_run(stream, data, end, bytes(data[at:body]))
            elif end > size or calls.is_over:
                if kind in HEADER_FRAMES:
                    header_bytes += self._count(kind, end - body, is_read=end <= size or calls.is_over)
            elif head == WINDOW_UPDATE_HEAD:
                is_ours = calls.open_window(stream, NUMBER.unpack_from(data, body)[0])
            elif kind == HEADERS:
                block = bytes(data[body:end]) if own is None else own[body:end]
                template = templates.get(block)
                if flags != END_HEADERS or template is None or not calls.begin(stream, template):
                    header_bytes += self._count(kind, end - body)
                    self._headers(data[passed:end], flags, stream, block, handler)
                    passed = at = end
                    if header_bytes > HEADER_BYTES_A_TURN:
                        self._has_more = True
                        break
                    continue
                is_ours = True
            elif head == RST_STREAM_HEAD:
                is_ours = calls.reset(stream)
            elif kind == GOAWAY:  # libnghttp2 must see every call before it ends the connection
                calls.retire()
            elif kind in HINTS:  # libnghttp2 would store them for streams that it never sees
                is_ours = kind != PRIORITY_FRAME or end - body == PRIORITY_BYTES  # libnghttp2 rejects other lengths
            if is_ours:
                if passed < at:
                    feed(data[passed:at])
                passed = at = min(end, size)
            elif end <= size:
                at = end
                if header_bytes > HEADER_BYTES_A_TURN:
                    self._has_more = True
                    break
            elif kind != DATA and end - body <= MAX_WAIT_BYTES and not calls.is_over:
                break
            else:
                feed(data[passed:at])
                self._begin(data[at:], kind, flags, stream, handler)
                self._left = end - size
                passed = at = size
        else:
            self._has_more = True
        if passed < at:
            feed(data[passed:at])
        return at

    def _count(self, kind: int, size: int, *, is_read: bool = True) -> int:
        """Count `size` bytes of a header list and return them; without `is_read` they will be counted again.

        Raises:
            DenialOfServiceError: the list is too long.
        """
        block_bytes = size + (self._block_bytes if kind == CONTINUATION else 0)
        if block_bytes > self._max_block_bytes and size <= FRAME_BYTES:  # libnghttp2 rejects larger frames
            raise DenialOfServiceError(f"a list of headers takes more than {self._max_block_bytes} bytes as it is sent")
        if is_read:
            self._block_bytes = block_bytes
        return size

    def _headers(self, data: Bytes, flags: int, stream: int, block: bytes, handler: FrameHandler) -> None:
        """Hand libnghttp2 bytes that end with a HEADERS frame."""
        is_new = self._calls.make_way(stream, flags)
        handler.feed(data)
        self._calls.learn(flags, block, handler.template_of(stream) if is_new else None)
        if is_new and flags & END_HEADERS:
            handler.explain(stream)

    def _data(self, data: Bytes, body: int, end: int, flags: int, stream: int) -> bool:
        """Read as much of a DATA frame as is there; False if it belongs to libnghttp2."""
        calls, size = self._calls, len(data)
        if stream in calls.requests.calls:
            if flags & ~END_STREAM or end - body > FRAME_BYTES:
                calls.retire()
                return False
        elif stream in calls.granted:  # the call has ended
            calls.retire()
            return False
        elif not calls.http2_latest < stream <= calls.latest:
            return False
        is_ours = calls.take(stream, data[body:end], is_last=end <= size and bool(flags & END_STREAM))
        if is_ours and end > size:
            self._left, self._stream, self._flags = end - size, stream, flags
        return is_ours

    def _begin(self, data: Bytes, kind: int, flags: int, stream: int, handler: FrameHandler) -> None:
        """Pass on the beginning of a frame for libnghttp2 that is too large to buffer."""
        if kind == DATA and not flags & PADDED and HEAD.unpack_from(data)[0] >> 8 <= FRAME_BYTES:
            self._stream, self._flags = stream, flags
            self._pass_on(data[HEAD_BYTES:], 0, handler)
        else:
            self._calls.retire()
            self._stream = 0
            handler.feed(data)

    def _continue_frame(self, data: Bytes, handler: FrameHandler) -> int:
        """Pass on more of a frame that arrives in pieces; returns the number of bytes used."""
        piece = data[: self._left]
        self._left -= len(piece)
        flags = 0 if self._left else self._flags
        calls, stream = self._calls, self._stream
        if not stream:
            handler.feed(piece)
        elif not calls.http2_latest < stream <= calls.latest or not calls.take(stream, piece, is_last=bool(flags & END_STREAM)):
            self._pass_on(piece, flags, handler)
        return len(piece)

    def _pass_on(self, piece: Bytes, flags: int, handler: FrameHandler) -> None:
        handler.feed(head_of(DATA, flags, self._stream, len(piece)))
        handler.feed(piece)


class DiscardingReader:
    """Drops the input of a closed connection."""

    __slots__ = ()

    def read(self, data: Bytes, handler: FrameHandler) -> bool:  # noqa: ARG002  (the signature is FrameReader's)
        return False

    def keep(self, data: Bytes) -> None: ...
