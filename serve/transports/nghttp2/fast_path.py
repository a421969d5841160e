"""Fast path for repeated calls, which libnghttp2 does not see.

Most calls of a client have the same header bytes, one message each way, and a short life. They are read and answered here,
because libnghttp2 takes longer to process such a call than it takes to answer it. Calls that need anything else are handed
over: libnghttp2 is given frames that open them, in the order of their streams, and carries them on.

The connection's send window is shared out: credit from later WINDOW_UPDATEs is used here, and libnghttp2 gets of it what it
needs. Credit that libnghttp2 has received stays with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from ngh2 import Connection, NGH2Error, StreamClosed, StreamReset

from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.grpc_framing import LARGE_MESSAGE_BYTES, OK_TRAILERS, PREFIX_BYTES, RESPONSE, Headers
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.flow_control import ReceiveWindows
from halfserve.serve.transports.nghttp2.frames import (
    AUTHORITY,
    CONTENT_TYPE,
    DEFAULT_FRAME_BYTES,
    DEFAULT_TABLE_BYTES,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    METHOD_POST,
    NO_ERROR,
    PADDED,
    PATH_ROOT,
    PRIORITY,
    SCHEME_HTTP,
    STATUS_200,
    head_of,
    literal,
    literals,
    repeats,
    rst_stream,
    window_update,
    with_last_stream,
)
from halfserve.serve.transports.nghttp2.pending_requests import Call, PendingRequests, UnaryCall

CONTENT_LENGTH: Final = b"content-length"

MAX_TEMPLATES: Final = 64  # templates of one connection: clients vary their deadlines
MAX_BLOCK_BYTES: Final = 1024  # largest header block to cache; inspecting one takes up to 2 us a field

# Minimal headers that open a stream in libnghttp2.
_CALL: Final = METHOD_POST + SCHEME_HTTP + PATH_ROOT + AUTHORITY + literal(b"x")
_BEGIN: Final = STATUS_200 + CONTENT_TYPE + literal(dict(RESPONSE)[b"content-type"])
_END: Final = literals(OK_TRAILERS)
# Heads without the number of their stream.
_BEGIN_HEAD: Final = head_of(HEADERS, END_HEADERS, 0, len(_BEGIN))[:-4]
_END_HEAD: Final = head_of(HEADERS, END_HEADERS | END_STREAM, 0, len(_END))[:-4]


class CallTemplate:
    """How to open calls with certain header bytes.

    Attributes:
        open: opens a call on a stream.
        length: the content-length, if any.
    """

    __slots__ = ("length", "open")

    def __init__(self, open_call: Callable[[int], UnaryCall], length: int | None) -> None:
        self.open = open_call
        self.length = length


class FastPath:
    """The fast path of one connection."""

    __slots__ = (
        "_explained", "_frame_bytes", "_has_fed", "_has_large", "_http2", "_limits", "_spare", "_stream_window", "_unsent",
        "_windows", "calls", "closed", "granted", "http2_latest", "is_open", "is_over", "latest", "requests", "templates",
    )  # fmt: skip

    def __init__(
        self, http2: Connection, calls: dict[int, Call], windows: ReceiveWindows, limits: TransportLimits, share: MemoryShare
    ) -> None:
        """`windows` count the handed-over messages, `share` the memory of requests that arrive in pieces."""
        self._http2 = http2
        self._windows = windows
        self._limits = limits
        self._stream_window, self._frame_bytes = DEFAULT_WINDOW_BYTES, DEFAULT_FRAME_BYTES
        self.calls = calls  # all calls in flight by stream, libnghttp2's included
        self.granted: dict[int, int] = {}  # unanswered fast-path calls by stream, with their additional send window
        self.requests = PendingRequests(limits, share)  # incomplete requests of these calls
        self.templates: dict[bytes, CallTemplate] = {}  # keys are header blocks
        self._spare = 0  # bytes of the connection's send window
        self.latest = self.http2_latest = 0  # the highest stream opened by the client, and the highest known to libnghttp2
        self._unsent: list[bytes] = []  # frames to send
        self._has_large = False  # whether a large message is among them
        # Responses to calls that libnghttp2 is about to reset, sent before the resets unless the connection ends.
        self._explained: list[bytes] = []
        self.closed: list[int] = []  # streams that libnghttp2 closed during a hand-over
        # Calls begin and are answered here while this is open: not while libnghttp2 has unsent data or unacknowledged settings.
        self.is_open = False
        self.is_over = False  # closed for good
        self._has_fed = False  # libnghttp2 has got frames from here since the latest flush

    # Receiving

    def begin(self, stream: int, template: CallTemplate) -> bool:
        """Open a call; False if it belongs to libnghttp2."""
        is_new = self.latest < stream <= MAX_STREAM and stream & 1
        if not is_new or not self.is_open or len(self.calls) >= self._limits.max_streams:
            return False
        call = template.open(stream)
        self.latest = stream
        self.granted[stream] = 0
        self.requests.calls[stream] = self.calls[stream] = call
        if template.length is not None:
            self.requests.announced[stream] = template.length
        return True

    def make_way(self, stream: int, flags: int) -> bool:
        """Prepare for a HEADERS frame that libnghttp2 reads next; whether it opens a call."""
        is_new = self.latest < stream <= MAX_STREAM
        if not flags & END_HEADERS or self.http2_latest < stream <= self.latest:
            self.retire()
        self.hand_over()
        self.latest = self.http2_latest = max(self.latest, stream & MAX_STREAM)
        return is_new

    def learn(self, flags: int, block: bytes, template: CallTemplate | None) -> None:
        """Keep the template of a call's header block; None for calls that belong to libnghttp2."""
        if flags & (PADDED | PRIORITY) or len(block) > MAX_BLOCK_BYTES or not repeats(block):
            self.templates.clear()  # the dynamic table may have changed
        elif template is not None and not self.is_over:
            if len(self.templates) >= MAX_TEMPLATES:
                self.templates.clear()
            self.templates[block] = template

    def take(self, stream: int, piece: bytes | memoryview, *, is_last: bool) -> bool:
        """Take a part of a request, or the rest of a finished call's; False if it belongs to libnghttp2."""
        if self.requests.take(stream, piece, is_last=is_last):
            return True
        self.hand_over()
        return False

    def open_window(self, stream: int, size: int) -> bool:
        """Apply a WINDOW_UPDATE; False if it belongs to libnghttp2."""
        if not stream:
            if size and size <= MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES - self._spare:
                self._spare += size
                return True
            self._give_window()  # possibly an overflow, which libnghttp2 detects
            return False
        granted = self.granted.get(stream)
        if granted is None:
            return self.http2_latest < stream <= self.latest
        if not size or size > MAX_WINDOW_BYTES - self._stream_window - granted:
            self.retire()
            return False
        self.granted[stream] = granted + size
        return True

    def reset(self, stream: int) -> bool:
        """Apply RST_STREAM; False if it belongs to libnghttp2, which limits the rate of resets."""
        if stream in self.granted:
            self.hand_over()
            return False
        return self.http2_latest < stream <= self.latest

    def settings(self, settings: Mapping[int, int]) -> None:
        """Apply the client's SETTINGS."""
        self._stream_window = settings.get(INITIAL_WINDOW_SIZE, self._stream_window)
        self._frame_bytes = settings.get(MAX_FRAME_SIZE, self._frame_bytes)
        self.is_open = False  # until they are acknowledged, the client may follow the old ones
        if settings.get(HEADER_TABLE_SIZE, DEFAULT_TABLE_BYTES) < DEFAULT_TABLE_BYTES:
            self.retire()  # the next header block must announce the smaller table

    # Sending

    def answer(self, stream: int, message: bytes) -> bool:
        """Send the only response of a call, with status OK; False if libnghttp2 must send it."""
        length = len(message) + PREFIX_BYTES
        granted = self.granted.pop(stream)
        if not self.is_open or length > self._spare or length > self._frame_bytes or length > self._stream_window + granted:
            self.granted[stream] = granted
            self.hand_over()
            self.is_open = False
            return False
        del self.calls[stream]
        if self._windows.answering:
            self._windows.answered(stream)
        self._spare -= length
        if length >= LARGE_MESSAGE_BYTES:
            self._has_large = True
        number = stream.to_bytes(4, "big")
        self._unsent += [
            _BEGIN_HEAD,
            number,
            _BEGIN,
            (length << 16).to_bytes(5, "big"),  # the rest of this head, DATA and no flags, is zeros
            number,
            (length - PREFIX_BYTES).to_bytes(5, "big"),  # the prefix: uncompressed, so many bytes
            message,
            _END_HEAD,
            number,
            _END,
        ]
        return True

    def fail(self, stream: int, trailers: Headers, *, ended: bool) -> bool:
        """End a call with trailers only; False if libnghttp2 must send them. `ended`: the client has ended its side."""
        block = _BEGIN + literals(trailers)
        if not self.is_open or len(block) > self._frame_bytes:
            self.hand_over()
            return False
        del self.calls[stream], self.granted[stream]
        self.requests.forget(stream)
        self._windows.answered(stream)
        self._unsent.append(head_of(HEADERS, END_HEADERS | END_STREAM, stream, len(block)) + block)
        if not ended:
            self._unsent.append(rst_stream(stream, NO_ERROR))
        return True

    def explain(self, stream: int, trailers: Headers) -> None:
        """Queue the response to a call that libnghttp2 is about to reset."""
        if not self.is_over:
            block = _BEGIN + literals(trailers)
            self._explained.append(head_of(HEADERS, END_HEADERS | END_STREAM, stream, len(block)) + block)

    def explain_resets(self, resets: bytes, *, is_last: bool) -> None:
        """Queue libnghttp2's frames that reset calls, behind the responses that explain why.

        `is_last`: the connection ends with these frames, so that nothing is explained.
        """
        if is_last:
            resets = self.last_words(resets)
        else:
            self._unsent += self._explained
        self._explained.clear()
        self._unsent.append(resets)

    def write(self, transport: asyncio.Transport) -> None:
        """Write pending frames.

        Reopens the connection's receive window when it becomes small, or at once while libnghttp2 withholds some of it.
        """
        if self._is_due and not self._windows.is_held_up:
            self._pay()
        unsent = self._unsent
        if unsent:
            if self._has_large:
                transport.writelines(unsent)
                self._has_large = False
            else:
                transport.write(b"".join(unsent))
            unsent.clear()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def has_explained(self) -> bool:
        """Whether responses wait for the resets of libnghttp2 that they explain."""
        return bool(self._explained)

    @property
    def has_news(self) -> bool:
        """Whether a flush may have something to do, besides what libnghttp2 has read."""
        return bool(self._has_fed or not self.is_open or self._unsent or self.closed or self._explained or self._is_due)

    def pause(self) -> None:
        """Take no further calls, as the socket is full, until the next flush opens the fast path again."""
        self.is_open = False

    def resume(self) -> None:
        """Take calls again, as libnghttp2 has nothing to send, where there is send window for their responses."""
        self._has_fed = False
        self.is_open = self._spare > 0

    def relieve(self, *, paused: bool) -> bool:
        """Give libnghttp2 send window that it lacks; whether it can send more now."""
        is_short = self._http2.queued_body_size() > 0
        self._has_fed = False
        self.is_open = self._spare > 0 and not is_short and not paused
        if paused or not is_short or not self._spare:
            return False
        self._give_window()
        return True

    def last_words(self, frames: bytes) -> bytes:
        """libnghttp2's final frames, with the last stream processed by either side."""
        if self.is_over:  # libnghttp2 knows all streams
            return frames
        self._forget_all()
        return with_last_stream(frames, self.latest)

    def clear(self) -> None:
        """Forget everything: the connection is lost."""
        self._forget_all()
        self._unsent.clear()
        self._explained.clear()
        self.closed.clear()

    # Handing over to libnghttp2

    def hand_over(self) -> None:
        """Hand all calls over to libnghttp2."""
        if not self.granted:
            return
        requests, frames = self.requests, []
        for stream, granted in sorted(self.granted.items()):
            end = 0 if stream in requests.calls else END_STREAM
            block = _CALL
            if stream in requests.announced:  # libnghttp2 checks it
                block += literals([(CONTENT_LENGTH, b"%d" % requests.announced[stream])])
            frames.append(head_of(HEADERS, END_HEADERS | end, stream, len(block)) + block)
            if granted:
                frames.append(window_update(stream, granted))
            self.http2_latest = stream
        unfinished = dict(requests.growing)
        self.granted.clear()
        requests.clear()
        self._feed(b"".join(frames))
        for stream, growing in unfinished.items():
            call = self.calls[stream]
            call.receive(growing.so_far())
            self._unsent.append(window_update(stream, growing.came))
            self._windows.must_wait(stream, call.held_bytes)

    def retire(self) -> None:
        """Close the fast path and leave the connection to libnghttp2."""
        if self.is_over:
            return
        self.is_over = True
        self.templates.clear()
        self.hand_over()
        frames = []
        if self.latest > self.http2_latest:  # later frames of these streams must not look like frames of idle streams
            block = head_of(HEADERS, END_HEADERS | END_STREAM, self.latest, len(_CALL)) + _CALL
            frames = [block, rst_stream(self.latest, NO_ERROR)]
            self.http2_latest = self.latest
        if frames:
            self._feed(b"".join(frames))
        self._give_window()
        if self.requests.owed:
            self._pay()

    @property
    def _is_due(self) -> bool:
        """Whether the connection's receive window should be reopened."""
        owed, windows = self.requests.owed, self._windows
        return owed > 0 and (owed > windows.acknowledge_at or windows.unacknowledged > 0)

    def _pay(self) -> None:
        """Reopen the connection's receive window by the received bytes."""
        self._unsent.append(window_update(0, self.requests.owed))
        self.requests.owed = 0

    def _give_window(self) -> None:
        """Give libnghttp2 the remaining send window of the connection."""
        if self._spare:
            self._feed(window_update(0, self._spare))
            self._spare = 0

    def _feed(self, frames: bytes) -> None:
        """Give libnghttp2 frames as if the client had sent them; their effects on calls are already done."""
        try:
            self._has_fed = True
            self._http2.receive_data(frames)
            events = self._http2.events()
        except NGH2Error:  # the connection has ended
            return
        self.closed += [event.stream_id for event in events if isinstance(event, StreamClosed | StreamReset)]

    def _forget_all(self) -> None:
        self.is_over = True
        self.templates.clear()
        self.granted.clear()
        self.requests.clear()
