"""Splits received bytes into frames: the fast path reads those of its calls, libnghttp2 all others.

libnghttp2 gets its frames as received, many at a time. It is never left inside a frame while calls may be handed over to it: a
DATA frame that arrives in pieces is passed on as several smaller DATA frames.
"""

from __future__ import annotations

from typing import Final

from ngh2.exceptions import DenialOfServiceError

from halfserve.serve.transports.grpc_framing import PREFIX, PREFIX_BYTES
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
from halfserve.serve.transports.nghttp2.session import GrpcSession

FRAMES_A_TURN: Final = 512  # limit per connection and loop iteration; a call has two to four
# Encoded header bytes that libnghttp2 decodes per iteration: one byte can be a field. A usual call has 50 to 250.
HEADER_BYTES_A_TURN: Final = 4096
MAX_WAIT_BYTES: Final = 16_384  # largest frame that is buffered until it is complete
WINDOW_UPDATE_HEAD: Final = 4 << 8 | WINDOW_UPDATE
RST_STREAM_HEAD: Final = 4 << 8 | RST_STREAM
READ_PREFIX: Final = PREFIX.unpack_from
HEADER_FRAMES: Final = frozenset({HEADERS, CONTINUATION})
LARGE_BYTES: Final = 16_384  # smallest input that is parsed without a copy
MIN_RUN_BYTES: Final = 4096  # smallest input whose frames are taken many at a time

Bytes = bytes | memoryview


class FrameReader:
    """The reader of one connection, between its fast path and its session, which owns libnghttp2."""

    __slots__ = (
        "_block_bytes", "_calls", "_flags", "_has_more", "_header_bytes", "_left", "_max_block_bytes", "_rest", "_session",
        "_stream",
    )  # fmt: skip

    def __init__(self, session: GrpcSession, max_block_bytes: int) -> None:
        """`max_block_bytes` limits one encoded header list."""
        self._session = session
        self._calls = session.fast_path
        self._max_block_bytes = max_block_bytes
        self._header_bytes = 0  # encoded bytes of header lists in this `read`
        self._block_bytes = 0  # size of the latest header list, which CONTINUATION may extend
        self._rest = b""  # an incomplete frame, or frames left for a later iteration
        self._has_more = False  # in _rest
        self._left = PREFACE_BYTES  # bytes missing of a frame that is passed on in pieces
        self._stream, self._flags = 0, 0  # stream and flags of that DATA frame; stream 0 if libnghttp2 gets it unchanged

    def read(self, data: Bytes) -> bool:
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
        at = self._frames(data, self._continue_frame(data) if self._left else 0)
        self._rest = bytes(data[at:]) if at < len(data) else b""
        return self._has_more

    def keep(self, data: Bytes) -> None:
        """Buffer bytes for a later `read`."""
        self._rest += data

    def _frames(self, data: Bytes, at: int) -> int:  # noqa: C901, PLR0912  (hot: the loop is one function)
        """Read frames from `at` on; returns the end of the last one."""
        calls, feed, read_head = self._calls, self._session.feed, HEAD.unpack_from
        templates = calls.templates
        # Declared, as compiled code would take what struct returns for objects of any type.
        head: int
        flags: int
        stream: int
        own = data if isinstance(data, bytes) else None  # slices of bytes alone are compiled to one call
        size, passed = len(data), at  # bytes from `passed` to `at` are libnghttp2's, not handed over yet
        self._header_bytes = 0
        for _ in range(FRAMES_A_TURN):
            body = at + HEAD_BYTES
            if body > size:
                break
            head, flags, stream = read_head(data, at)
            stream &= MAX_STREAM  # without the reserved bit
            end = body + (head >> 8)
            kind = head & 0xFF
            if kind == DATA:
                is_ours = flags == END_STREAM and end <= size and self._whole_request(data, body, end, stream)
                if not is_ours and (taken := self._data(data, at, end, flags, stream)):
                    is_ours, end = True, taken
            elif kind == HEADERS and end <= size and not calls.is_over:
                block = bytes(data[body:end]) if own is None else own[body:end]
                template = templates.get(block)
                is_ours = flags == END_HEADERS and template is not None and calls.begin(stream, template)
                if not is_ours:
                    self._count(kind, end - body)
                    self._headers(data[passed:end], flags, stream, block)
                    passed = end
            else:
                is_ours = self._other_frame(data, body, end, head, stream)
            if is_ours:
                if passed < at:
                    feed(data[passed:at])
                passed = at = min(end, size)
            elif end <= size:
                at = end
                if self._header_bytes > HEADER_BYTES_A_TURN:
                    self._has_more = True
                    break
            elif kind != DATA and end - body <= MAX_WAIT_BYTES and not calls.is_over:
                break
            else:
                feed(data[passed:at])
                self._begin(data[at:], kind, flags, stream)
                self._left = end - size
                passed = at = size
        else:
            self._has_more = True
        if passed < at:
            feed(data[passed:at])
        return at

    def _whole_request(self, data: Bytes, body: int, end: int, stream: int) -> bool:
        """Take a stream's last DATA frame if it is the whole request of a fast-path call; otherwise return False."""
        size, requests = end - body, self._calls.requests
        call = requests.calls.get(stream)
        if (
            call is None
            or size < PREFIX_BYTES
            or size > requests.max_whole
            or (requests.growing and stream in requests.growing)
        ):
            return False
        flag: int
        length: int
        flag, length = READ_PREFIX(data, body)
        if flag or length != size - PREFIX_BYTES:
            return False
        announced = requests.announced
        if announced and announced.get(stream, size) != size:
            return False
        requests.owed += size
        if announced:
            announced.pop(stream, None)
        del requests.calls[stream]
        at = body + PREFIX_BYTES
        call.take(data[at:end] if isinstance(data, bytes) else bytes(data[at:end]))  # a slice of bytes is compiled to one call
        return True

    def _other_frame(self, data: Bytes, body: int, end: int, head: int, stream: int) -> bool:
        """Read a frame that opens no fast-path call and has no request; False if it belongs to libnghttp2."""
        calls, kind = self._calls, head & 0xFF
        if calls.is_over or end > len(data):
            if kind in HEADER_FRAMES:
                self._count(kind, end - body, is_read=calls.is_over or end <= len(data))
            return False
        if head == WINDOW_UPDATE_HEAD:
            return calls.open_window(stream, NUMBER.unpack_from(data, body)[0])
        if head == RST_STREAM_HEAD:
            return calls.reset(stream)
        if kind == GOAWAY:  # libnghttp2 must see every call before it ends the connection
            calls.retire()
            return False
        # libnghttp2 would store hints for streams that it never sees; it rejects priorities of other lengths.
        return kind in HINTS and (kind != PRIORITY_FRAME or end - body == PRIORITY_BYTES)

    def _count(self, kind: int, size: int, *, is_read: bool = True) -> None:
        """Count `size` bytes of a header list; without `is_read` they will be counted again.

        Raises:
            DenialOfServiceError: the list is too long.
        """
        block_bytes = size + (self._block_bytes if kind == CONTINUATION else 0)
        if block_bytes > self._max_block_bytes and size <= FRAME_BYTES:  # libnghttp2 rejects larger frames
            raise DenialOfServiceError(f"a list of headers takes more than {self._max_block_bytes} bytes as it is sent")
        if is_read:
            self._block_bytes = block_bytes
        self._header_bytes += size

    def _headers(self, data: Bytes, flags: int, stream: int, block: bytes) -> None:
        """Hand libnghttp2 bytes that end with a HEADERS frame."""
        is_new = self._calls.make_way(stream, flags)
        self._session.feed(data)
        self._calls.learn(flags, block, self._session.template_of(stream) if is_new else None)
        if is_new and flags & END_HEADERS:
            self._session.explain(stream)

    def _data(self, data: Bytes, at: int, end: int, flags: int, stream: int) -> int:
        """Take as much of the DATA frame at `at` as is there, and the frames like it that follow.

        Returns:
            The end of the last frame; 0, with nothing taken, if the frame belongs to libnghttp2.
        """
        calls, size, body = self._calls, len(data), at + HEAD_BYTES
        if stream in calls.requests.calls:
            if flags & ~END_STREAM or end - body > FRAME_BYTES:
                calls.retire()
                return 0
        elif calls.has_unanswered(stream):  # the request is complete: the client breaks the protocol
            calls.retire()
            return 0
        elif not calls.owns(stream):
            return 0
        if not calls.take(stream, data[body:end], is_last=end <= size and bool(flags & END_STREAM)):
            return 0
        if end > size:
            self._left, self._stream, self._flags = end - size, stream, flags
        elif not flags and end - body >= MIN_RUN_BYTES and end < size and stream in calls.requests.growing:
            return calls.requests.take_run(stream, data, end, bytes(data[at:body]))
        return end

    def _begin(self, data: Bytes, kind: int, flags: int, stream: int) -> None:
        """Pass on the beginning of a frame for libnghttp2 that is too large to buffer."""
        if kind == DATA and not flags & PADDED and HEAD.unpack_from(data)[0] >> 8 <= FRAME_BYTES:
            self._stream, self._flags = stream, flags
            self._pass_on(data[HEAD_BYTES:], 0)
        else:
            self._calls.retire()
            self._stream = 0
            self._session.feed(data)

    def _continue_frame(self, data: Bytes) -> int:
        """Pass on more of a frame that arrives in pieces; returns the number of bytes used."""
        piece = data[: self._left]
        self._left -= len(piece)
        flags = 0 if self._left else self._flags
        calls, stream = self._calls, self._stream
        if not stream:
            self._session.feed(piece)
        elif not calls.owns(stream) or not calls.take(stream, piece, is_last=bool(flags & END_STREAM)):
            self._pass_on(piece, flags)
        return len(piece)

    def _pass_on(self, piece: Bytes, flags: int) -> None:
        self._session.feed(head_of(DATA, flags, self._stream, len(piece)))
        self._session.feed(piece)


class DiscardingReader:
    """Drops the input of a closed connection."""

    __slots__ = ()

    def read(self, data: Bytes) -> bool:  # noqa: ARG002  (the signature is FrameReader's)
        return False

    def keep(self, data: Bytes) -> None: ...
