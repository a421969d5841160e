"""Fast path for repeated calls, which libnghttp2 does not see.

Most calls of a client have the same header bytes, one message each way, and a short life. They are read and answered here,
because libnghttp2 takes longer to process such a call than it takes to answer it. Calls that need anything else are handed
over: libnghttp2 is given frames that open them, in the order of their streams, and carries them on.

The connection's send window is shared out: credit from later WINDOW_UPDATEs is used here, and libnghttp2 gets of it what it
needs. Credit that libnghttp2 has received stays with it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from halfserve.serve.transports.nghttp2.wire import WRITE_BYTES, is_at_its_end

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
    """The fast path of one connection.

    It begins calls (`begin`), takes their requests (`take`) and answers them (`answer`, `fail`), or hands all of them over to
    libnghttp2 (`hand_over`). The other methods read frames that concern its streams, and write its own.

    Attributes:
        closed: streams that libnghttp2 closed during a hand-over, whose calls the session has not ended yet.
        requests: incomplete requests of its calls.
        templates: templates of the calls that it can begin, by their header blocks.
    """

    __slots__ = (
        "_calls", "_explained", "_frame_bytes", "_granted", "_has_fed", "_has_large", "_http2", "_http2_latest", "_is_open",
        "_is_over", "_latest", "_limits", "_spare", "_stream_window", "_unsent", "_windows", "closed", "requests", "templates",
    )  # fmt: skip

    def __init__(
        self, http2: Connection, calls: dict[int, Call], windows: ReceiveWindows, limits: TransportLimits, share: MemoryShare
    ) -> None:
        """`calls` are all calls in flight. `windows` count the handed-over messages, `share` the memory of requests that arrive
        in pieces.
        """
        self._http2 = http2
        self._windows = windows
        self._limits = limits
        self._stream_window, self._frame_bytes = DEFAULT_WINDOW_BYTES, DEFAULT_FRAME_BYTES
        self._calls = calls  # by stream, libnghttp2's included
        self._granted: dict[int, int] = {}  # unanswered fast-path calls by stream, with their additional send window
        self.requests = PendingRequests(limits, share)
        self.templates: dict[bytes, CallTemplate] = {}
        self._spare = 0  # bytes of the connection's send window
        self._latest = self._http2_latest = 0  # the highest stream opened by the client, and the highest known to libnghttp2
        self._unsent: list[bytes] = []  # frames to send
        self._has_large = False  # whether a large message is among them
        # Responses to calls that libnghttp2 is about to reset, sent before the resets unless the connection ends.
        self._explained: list[bytes] = []
        self.closed: list[int] = []
        # Calls begin and are answered here while this is open: not while libnghttp2 has unsent data or unacknowledged settings.
        self._is_open = False
        self._is_over = False  # closed for good
        self._has_fed = False  # libnghttp2 has got frames from here since the latest flush

    @property
    def is_open(self) -> bool:
        """Whether calls begin and are answered here now."""
        return self._is_open

    @property
    def is_over(self) -> bool:
        """Whether all streams are libnghttp2's, for good."""
        return self._is_over

    @property
    def latest(self) -> int:
        """The highest stream that the client has opened."""
        return self._latest

    def owns(self, stream: int) -> bool:
        """Return whether a stream began here, and libnghttp2 does not know it; its call may be answered."""
        return self._http2_latest < stream <= self._latest

    def has_unanswered(self, stream: int) -> bool:
        """Return whether a stream has a fast-path call in flight."""
        return stream in self._granted

    # Receiving

    def begin(self, stream: int, template: CallTemplate) -> bool:
        """Open a call; False if it belongs to libnghttp2."""
        is_new = self._latest < stream <= MAX_STREAM and stream & 1
        if not is_new or not self._is_open or len(self._calls) >= self._limits.max_streams:
            return False
        call = template.open(stream)
        self._latest = stream
        self._granted[stream] = 0
        self.requests.calls[stream] = self._calls[stream] = call
        if template.length is not None:
            self.requests.announced[stream] = template.length
        return True

    def make_way(self, stream: int, flags: int) -> bool:
        """Prepare for a HEADERS frame that libnghttp2 reads next; whether it opens a call."""
        is_new = self._latest < stream <= MAX_STREAM
        if not flags & END_HEADERS or self.owns(stream):
            self.retire()
        self.hand_over()
        self._latest = self._http2_latest = max(self._latest, stream & MAX_STREAM)
        return is_new

    def learn(self, flags: int, block: bytes, template: CallTemplate | None) -> None:
        """Keep the template of a call's header block; None for calls that belong to libnghttp2."""
        if flags & (PADDED | PRIORITY) or len(block) > MAX_BLOCK_BYTES or not repeats(block):
            self.templates.clear()  # the dynamic table may have changed
        elif template is not None and not self._is_over:
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
        granted = self._granted.get(stream)
        if granted is None:
            return self.owns(stream)
        if not size or size > MAX_WINDOW_BYTES - self._stream_window - granted:
            self.retire()
            return False
        self._granted[stream] = granted + size
        return True

    def reset(self, stream: int) -> bool:
        """Apply RST_STREAM; False if it belongs to libnghttp2, which limits the rate of resets."""
        if stream in self._granted:
            self.hand_over()
            return False
        return self.owns(stream)

    def settings(self, settings: Mapping[int, int]) -> None:
        """Apply the client's SETTINGS."""
        self._stream_window = settings.get(INITIAL_WINDOW_SIZE, self._stream_window)
        self._frame_bytes = settings.get(MAX_FRAME_SIZE, self._frame_bytes)
        self._is_open = False  # until they are acknowledged, the client may follow the old ones
        if settings.get(HEADER_TABLE_SIZE, DEFAULT_TABLE_BYTES) < DEFAULT_TABLE_BYTES:
            self.retire()  # the next header block must announce the smaller table

    # Sending

    def answer(self, stream: int, message: bytes) -> bool:
        """Send the only response of a call, with status OK; False if the call is libnghttp2's, or is now."""
        granted = self._granted.pop(stream, -1)
        if granted < 0:
            return False
        length = len(message) + PREFIX_BYTES
        if not self._is_open or length > self._spare or length > self._frame_bytes or length > self._stream_window + granted:
            self._granted[stream] = granted
            self.hand_over()
            self._is_open = False
            return False
        del self._calls[stream]
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
        """End a call with trailers only; False if it is libnghttp2's, or is now. `ended`: the client has ended its side."""
        if stream not in self._granted:
            return False
        block = _BEGIN + literals(trailers)
        if not self._is_open or len(block) > self._frame_bytes:
            self.hand_over()
            return False
        del self._calls[stream], self._granted[stream]
        self.requests.forget(stream)
        self._windows.answered(stream)
        self._unsent.append(head_of(HEADERS, END_HEADERS | END_STREAM, stream, len(block)) + block)
        if not ended:
            self._unsent.append(rst_stream(stream, NO_ERROR))
        return True

    def explain(self, stream: int, trailers: Headers) -> None:
        """Queue the response to a call that libnghttp2 is about to reset."""
        if not self._is_over:
            block = _BEGIN + literals(trailers)
            self._explained.append(head_of(HEADERS, END_HEADERS | END_STREAM, stream, len(block)) + block)

    def write(self, transport: asyncio.Transport) -> bool:
        """Write pending frames; returns whether libnghttp2's were written too.

        Reopens the connection's receive window when it becomes small, or at once while libnghttp2 withholds some of it.
        """
        explains = False
        if self._explained:
            self._explain_resets()
            explains = True
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
        return explains

    def _explain_resets(self) -> None:
        """Queue libnghttp2's frames that reset calls, behind the responses that explain why.

        Only these frames show whether libnghttp2 ends the connection instead, as for undecodable headers.
        """
        resets = b""
        with contextlib.suppress(NGH2Error):
            resets = self._http2.data_to_send(WRITE_BYTES)
        if is_at_its_end(self._http2):
            resets = self.last_words(resets)
        else:
            self._unsent += self._explained
        self._explained.clear()
        self._unsent.append(resets)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def has_news(self) -> bool:
        """Whether a flush may have something to do, besides what libnghttp2 has read."""
        return bool(self._has_fed or not self._is_open or self._unsent or self.closed or self._explained or self._is_due)

    def pause(self) -> None:
        """Take no further calls, as the socket is full, until the next flush opens the fast path again."""
        self._is_open = False

    def resume(self) -> None:
        """Take calls again, as libnghttp2 has nothing to send, where there is send window for their responses."""
        self._has_fed = False
        self._is_open = self._spare > 0

    def relieve(self, *, paused: bool) -> bool:
        """Give libnghttp2 send window that it lacks; whether it can send more now."""
        is_short = self._http2.queued_body_size() > 0
        self._has_fed = False
        self._is_open = self._spare > 0 and not is_short and not paused
        if paused or not is_short or not self._spare:
            return False
        self._give_window()
        return True

    def last_words(self, frames: bytes) -> bytes:
        """libnghttp2's final frames, with the last stream processed by either side."""
        if self._is_over:  # libnghttp2 knows all streams
            return frames
        self._forget_all()
        return with_last_stream(frames, self._latest)

    def clear(self) -> None:
        """Forget everything: the connection is lost."""
        self._forget_all()
        self._unsent.clear()
        self._explained.clear()
        self.closed.clear()

    # Handing over to libnghttp2

    def hand_over(self) -> None:
        """Hand all calls over to libnghttp2."""
        if not self._granted:
            return
        requests, frames = self.requests, []
        for stream, granted in sorted(self._granted.items()):
            end = 0 if stream in requests.calls else END_STREAM
            block = _CALL
            if stream in requests.announced:  # libnghttp2 checks it
                block += literals([(CONTENT_LENGTH, b"%d" % requests.announced[stream])])
            frames.append(head_of(HEADERS, END_HEADERS | end, stream, len(block)) + block)
            if granted:
                frames.append(window_update(stream, granted))
            self._http2_latest = stream
        unfinished = dict(requests.growing)
        self._granted.clear()
        requests.clear()
        self._feed(b"".join(frames))
        for stream, growing in unfinished.items():
            call = self._calls[stream]
            call.receive(growing.so_far())
            self._unsent.append(window_update(stream, growing.came))
            self._windows.must_wait(stream, call.held_bytes)

    def retire(self) -> None:
        """Close the fast path and leave the connection to libnghttp2."""
        if self._is_over:
            return
        self._is_over = True
        self.templates.clear()
        self.hand_over()
        frames = []
        if self._latest > self._http2_latest:  # later frames of these streams must not look like frames of idle streams
            block = head_of(HEADERS, END_HEADERS | END_STREAM, self._latest, len(_CALL)) + _CALL
            frames = [block, rst_stream(self._latest, NO_ERROR)]
            self._http2_latest = self._latest
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
        self._is_over = True
        self.templates.clear()
        self._granted.clear()
        self.requests.clear()
