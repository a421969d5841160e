"""A connection's received bytes, frame by frame: those of repeated calls are read here, all others are libnghttp2's.

libnghttp2 gets its frames as they came, many at a time, and is never left inside of one while it may have to be told of calls:
what comes in pieces is passed on as frames of DATA that are smaller than the client's, which means the same.
"""

from __future__ import annotations

from typing import Protocol

from ngh2.exceptions import DenialOfServiceError

from serve.transports.grpc_framing import PREFIX, PREFIX_BYTES
from serve.transports.nghttp2.frames import (
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
from serve.transports.nghttp2.repeated_calls import Known, RepeatedCalls

FRAMES_A_TURN = 512  # of one connection; a call is two to four
# Of header blocks that libnghttp2 decodes in a turn, as sent: one byte can be a field. A usual call has 50 to 250.
HEADER_BYTES_A_TURN = 4096
MAX_WAIT_BYTES = 16_384  # of a frame that is kept until it is whole
WINDOW_UPDATE_HEAD, RST_STREAM_HEAD = NUMBER.size << 8 | WINDOW_UPDATE, NUMBER.size << 8 | RST_STREAM
HEADER_FRAMES = frozenset({HEADERS, CONTINUATION})
LARGE_BYTES = 16_384  # better not copied before it is known what they are

Bytes = bytes | memoryview


class Teller(Protocol):
    """Who has libnghttp2."""

    def tell(self, data: Bytes) -> None:
        """Hand bytes to libnghttp2, and what it makes of them to their calls."""

    def known(self, stream: int) -> Known | None:
        """What is known of a call that libnghttp2 has just been told of, if others like it can be read here."""

    def explain(self, stream: int) -> None:
        """Answer a call that libnghttp2 has just been told of, if its headers make libnghttp2 reset it."""


class FrameReader:
    """Reads one connection."""

    __slots__ = ("_block_bytes", "_calls", "_flags", "_has_more", "_left", "_max_block_bytes", "_rest", "_stream")

    def __init__(self, calls: RepeatedCalls, max_block_bytes: int) -> None:
        """A reader of nothing yet.

        Args:
            calls: that are read here.
            max_block_bytes: of one list of headers, as sent.
        """
        self._calls = calls
        self._max_block_bytes = max_block_bytes
        self._block_bytes = 0  # of the latest list of headers, which CONTINUATION may go on with
        self._rest = b""  # the beginning of a frame, or frames that a turn was too short for
        self._has_more = False  # of those
        self._left = PREFACE_BYTES  # bytes to come of what is passed on as it comes
        self._stream, self._flags = 0, 0  # of that frame of DATA; no stream where libnghttp2 gets it as it is

    def read(self, data: Bytes, teller: Teller) -> bool:
        """Take bytes; True where some are left for another turn, which is to be asked for with no more bytes.

        Args:
            data: as they came.
            teller: gets what is libnghttp2's.

        Raises:
            NGH2Error: the connection cannot go on.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        elif len(data) < LARGE_BYTES:
            data = bytes(data)
        self._has_more = False
        at = self._frames(data, self._go_on(data, teller) if self._left else 0, teller)
        self._rest = bytes(data[at:])
        return self._has_more

    def keep(self, data: Bytes) -> None:
        """Take bytes to read in another turn."""
        self._rest += data

    def _frames(self, data: Bytes, at: int, teller: Teller) -> int:  # noqa: C901, PLR0912, PLR0915  (calls cost too much)
        """Read the frames from a place on; where the last one ends."""
        calls, tell, read_head, read_prefix = self._calls, teller.tell, HEAD.unpack_from, PREFIX.unpack_from
        requests, known = calls.requests, calls.known
        expecting, growing, announced, max_whole = requests.calls, requests.growing, requests.announced, requests.max_whole
        size, passed = len(data), at  # what is from `passed` to `at` is libnghttp2's, which has not got it yet
        header_bytes = 0
        for _ in range(FRAMES_A_TURN):
            body = at + HEAD_BYTES
            if body > size:
                break
            head, flags, stream = read_head(data, at)
            stream &= MAX_STREAM  # a reserved bit, which means nothing
            end = body + (head >> 8)
            kind = head & 0xFF
            is_ours = False
            if kind == DATA:
                if (
                    flags == END_STREAM
                    and stream in expecting
                    and end <= size
                    and PREFIX_BYTES <= end - body <= max_whole
                    and read_prefix(data, body) == (0, end - body - PREFIX_BYTES)
                    and stream not in growing
                    and (not announced or announced.get(stream, end - body) == end - body)
                ):
                    requests.owed += end - body
                    if announced:
                        announced.pop(stream, None)
                    expecting.pop(stream).take(bytes(data[body + PREFIX_BYTES : end]))
                    is_ours = True
                else:
                    is_ours = self._data(data, body, end, flags, stream)
            elif end > size or calls.is_over:
                if kind in HEADER_FRAMES:
                    header_bytes += self._count(kind, end - body, is_read=end <= size or calls.is_over)
            elif head == WINDOW_UPDATE_HEAD:
                is_ours = calls.open_window(stream, NUMBER.unpack_from(data, body)[0])
            elif kind == HEADERS:
                block = bytes(data[body:end])
                alike = known.get(block)
                if flags != END_HEADERS or alike is None or not calls.begin(stream, alike):
                    header_bytes += self._count(kind, end - body)
                    self._headers(data[passed:end], flags, stream, block, teller)
                    passed = at = end
                    if header_bytes > HEADER_BYTES_A_TURN:
                        self._has_more = True
                        break
                    continue
                is_ours = True
            elif head == RST_STREAM_HEAD:
                is_ours = calls.reset(stream)
            elif kind == GOAWAY:  # libnghttp2 ends the connection when the calls that it knows of are over
                calls.retire()
            elif kind in HINTS:  # libnghttp2 would keep them for streams that it never hears of, until they are too many
                is_ours = kind != PRIORITY_FRAME or end - body == PRIORITY_BYTES  # it ends the connection for another length
            if is_ours:
                if passed < at:
                    tell(data[passed:at])
                passed = at = min(end, size)
            elif end <= size:
                at = end
                if header_bytes > HEADER_BYTES_A_TURN:
                    self._has_more = True
                    break
            elif kind != DATA and end - body <= MAX_WAIT_BYTES and not calls.is_over:
                break
            else:
                tell(data[passed:at])
                self._begin(data[at:], kind, flags, stream, teller)
                self._left = end - size
                passed = at = size
        else:
            self._has_more = True
        if passed < at:
            tell(data[passed:at])
        return at

    def _count(self, kind: int, size: int, *, is_read: bool = True) -> int:
        """Count `size` bytes of a list of headers, and return them; they are counted again where they are not read now.

        Raises:
            DenialOfServiceError: the list is too long.
        """
        block_bytes = size + (self._block_bytes if kind == CONTINUATION else 0)
        if block_bytes > self._max_block_bytes and size <= FRAME_BYTES:  # libnghttp2 has a word for larger frames
            raise DenialOfServiceError(f"a list of headers takes more than {self._max_block_bytes} bytes as it is sent")
        if is_read:
            self._block_bytes = block_bytes
        return size

    def _headers(self, data: Bytes, flags: int, stream: int, block: bytes, teller: Teller) -> None:
        """Tell libnghttp2 of headers, which these bytes end with."""
        is_new = self._calls.make_way(stream, flags)
        teller.tell(data)
        self._calls.learn(flags, block, teller.known(stream) if is_new else None)
        if is_new and flags & END_HEADERS:
            teller.explain(stream)

    def _data(self, data: Bytes, body: int, end: int, flags: int, stream: int) -> bool:
        """Read a frame of DATA that is no whole request, as far as it is there; False where it is libnghttp2's."""
        calls, size = self._calls, len(data)
        if stream in calls.requests.calls:
            if flags & ~END_STREAM or end - body > FRAME_BYTES:
                calls.retire()
                return False
        elif stream in calls.granted:  # the call has ended
            calls.retire()
            return False
        elif not calls.told < stream <= calls.latest:
            return False
        is_ours = calls.take(stream, data[body:end], is_last=end <= size and bool(flags & END_STREAM))
        if is_ours and end > size:
            self._left, self._stream, self._flags = end - size, stream, flags
        return is_ours

    def _begin(self, data: Bytes, kind: int, flags: int, stream: int, teller: Teller) -> None:
        """Pass on the beginning of a frame that is libnghttp2's and not worth waiting for."""
        if kind == DATA and not flags & PADDED and HEAD.unpack_from(data)[0] >> 8 <= FRAME_BYTES:
            self._stream, self._flags = stream, flags
            self._pass_on(data[HEAD_BYTES:], 0, teller)
        else:
            self._calls.retire()
            self._stream = 0
            teller.tell(data)

    def _go_on(self, data: Bytes, teller: Teller) -> int:
        """Take more of what is passed on as it comes; how much of these bytes it was."""
        piece = data[: self._left]
        self._left -= len(piece)
        flags = 0 if self._left else self._flags
        calls, stream = self._calls, self._stream
        if not stream:
            teller.tell(piece)
        elif not calls.told < stream <= calls.latest or not calls.take(stream, piece, is_last=bool(flags & END_STREAM)):
            self._pass_on(piece, flags, teller)
        return len(piece)

    def _pass_on(self, piece: Bytes, flags: int, teller: Teller) -> None:
        teller.tell(head_of(DATA, flags, self._stream, len(piece)))
        teller.tell(piece)


class NoReader:
    """Drops what comes on a connection that is over."""

    __slots__ = ()

    def read(self, data: Bytes, teller: Teller) -> bool:  # noqa: ARG002  (the signature is FrameReader's)
        """Take bytes; none are left."""
        return False

    def keep(self, data: Bytes) -> None:
        """Take bytes; nobody will read them."""
