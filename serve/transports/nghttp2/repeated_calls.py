"""Calls that libnghttp2 is not told of, as it takes longer to hear of them than they take to be answered.

A client's calls mostly begin with the same bytes, carry one message each way, and are over. Such a call is read and answered
here; libnghttp2, which goes by what it is told, knows nothing of it. Whatever is out of the ordinary is handed over: libnghttp2
is told then that these calls have begun, and carries them on. It hears of streams in the order of their numbers, as it must.

The window that the client has opened for a connection's answers is shared out: what it opens later may be used here, and
libnghttp2 gets of that what it is short of. What libnghttp2 once has it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import NamedTuple

from ngh2 import Connection, NGH2Error, StreamClosed, StreamReset

from serve.security.memory_budget import Share
from serve.transports.grpc_framing import PREFIX_BYTES
from serve.transports.grpc_headers import OK_TRAILERS, RESPONSE, Headers
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.call import Call, UnaryCall
from serve.transports.nghttp2.expected_requests import ExpectedRequests
from serve.transports.nghttp2.frames import (
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
    NO_ERROR,
    PADDED,
    PRIORITY,
    head_of,
    rst_stream,
    window_update,
    with_last_stream,
)
from serve.transports.nghttp2.hpack_blocks import (
    AUTHORITY,
    CONTENT_TYPE,
    METHOD_POST,
    PATH_ROOT,
    SCHEME_HTTP,
    STATUS_200,
    literal,
    literals,
    repeats,
)
from serve.transports.nghttp2.receive_windows import ReceiveWindows

CONTENT_LENGTH = b"content-length"

MAX_KNOWN = 64  # of one connection: clients vary their deadlines
MAX_BLOCK_BYTES = 1024  # that are looked through; it takes up to 2 us a field

# All that libnghttp2 needs to hear of the headers of a call that has been opened.
_CALL = METHOD_POST + SCHEME_HTTP + PATH_ROOT + AUTHORITY + literal(b"x")
_BEGIN = STATUS_200 + CONTENT_TYPE + literal(dict(RESPONSE)[b"content-type"])
_END = literals(OK_TRAILERS)
_BEGIN_HEAD, _END_HEAD = len(_BEGIN) << 8 | HEADERS, len(_END) << 8 | HEADERS
_ANSWER = Struct(f">IBI{len(_BEGIN)}sIBIBI").pack  # headers, then the head and the prefix of a message
_TRAILERS = Struct(f">IBI{len(_END)}s").pack


class Known(NamedTuple):
    """What is known of calls that begin with the same bytes.

    Attributes:
        open: begins one on a stream.
        length: bytes that its client announces to send, if it does.
    """

    open: Callable[[int], UnaryCall]
    length: int | None


class RepeatedCalls:
    """Those of one connection.

    Attributes:
        calls: all calls in flight, by stream; those that libnghttp2 knows of among them.
        granted: streams of the calls that are here and not answered yet, and by how much the client has opened their windows.
        requests: of the calls among them whose request is not whole.
        known: what is known of calls, by the bytes that they begin with.
        spare: bytes of the connection's window that may be sent.
        latest: the highest number of a stream.
        told: the highest that libnghttp2 has heard of.
        unsent: frames to send.
        explained: answers to calls that libnghttp2 is about to reset; to be sent before that, unless it ends the connection.
        closed: streams that libnghttp2 was found to be done with when it was told something.
        is_open: whether calls may begin and be answered here; not while libnghttp2 cannot send what it has, or has settings to
            acknowledge.
        is_over: whether none will any more.
    """

    __slots__ = (
        "_frame_bytes", "_http2", "_limits", "_stream_window", "_windows", "calls", "closed", "explained",
        "granted", "is_open", "is_over", "known", "latest", "requests", "spare", "told", "unsent",
    )  # fmt: skip

    def __init__(
        self, http2: Connection, calls: dict[int, Call], windows: ReceiveWindows, limits: TransportLimits, share: Share
    ) -> None:
        """None yet.

        Args:
            http2: is told where need be.
            calls: of the connection.
            windows: are told of the unfinished messages that are handed over.
            limits: of the connection.
            share: of the memory that all connections may take.
        """
        self._http2 = http2
        self._windows = windows
        self._limits = limits
        self._stream_window, self._frame_bytes = DEFAULT_WINDOW_BYTES, DEFAULT_FRAME_BYTES
        self.calls = calls
        self.granted: dict[int, int] = {}
        self.requests = ExpectedRequests(limits, share)
        self.known: dict[bytes, Known] = {}
        self.spare = self.latest = self.told = 0
        self.unsent: list[bytes] = []
        self.explained: list[bytes] = []
        self.closed: list[int] = []
        self.is_open = self.is_over = False

    # What comes

    def begin(self, stream: int, known: Known) -> bool:
        """Begin a call; False where it is not for here."""
        is_new = self.latest < stream <= MAX_STREAM and stream & 1
        if not is_new or not self.is_open or len(self.calls) >= self._limits.max_streams:
            return False
        call = known.open(stream)
        self.latest = stream
        self.granted[stream] = 0
        self.requests.calls[stream] = self.calls[stream] = call
        if known.length is not None:
            self.requests.announced[stream] = known.length
        return True

    def make_way(self, stream: int, flags: int) -> bool:
        """For headers that libnghttp2 is to be told of next; whether a call begins with them."""
        is_new = self.latest < stream <= MAX_STREAM
        if not flags & END_HEADERS or self.told < stream <= self.latest:
            self.retire()
        self.hand_over()
        self.latest = self.told = max(self.latest, stream & MAX_STREAM)
        return is_new

    def learn(self, flags: int, block: bytes, known: Known | None) -> None:
        """What a call began with that libnghttp2 was told of, and what is known of it; None if its like is not for here."""
        if flags & (PADDED | PRIORITY) or len(block) > MAX_BLOCK_BYTES or not repeats(block):
            self.known.clear()  # the same bytes may mean something else now
        elif known is not None and not self.is_over:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[block] = known

    def take(self, stream: int, piece: bytes | memoryview, *, is_last: bool) -> bool:
        """Take some of a call's request, or of what still comes for one that is over; False where it is for libnghttp2."""
        if self.requests.take(stream, piece, is_last=is_last):
            return True
        self.hand_over()
        return False

    def open_window(self, stream: int, size: int) -> bool:
        """The client takes `size` bytes more; False where it is for libnghttp2 to know."""
        if not stream:
            if size and size <= MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES - self.spare:
                self.spare += size
                return True
            self._give_window()  # it may be too much: libnghttp2, which then has it all, keeps count
            return False
        granted = self.granted.get(stream)
        if granted is None:
            return self.told < stream <= self.latest
        if not size or size > MAX_WINDOW_BYTES - self._stream_window - granted:
            self.retire()
            return False
        self.granted[stream] = granted + size
        return True

    def reset(self, stream: int) -> bool:
        """The client gives up a call; False where it is for libnghttp2 to know, which counts how often a client does so."""
        if stream in self.granted:
            self.hand_over()
            return False
        return self.told < stream <= self.latest

    def settings(self, settings: Mapping[int, int]) -> None:
        """The client's."""
        self._stream_window = settings.get(INITIAL_WINDOW_SIZE, self._stream_window)
        self._frame_bytes = settings.get(MAX_FRAME_SIZE, self._frame_bytes)
        self.is_open = False  # until libnghttp2 has acknowledged them: the client may hold to the others so long
        if settings.get(HEADER_TABLE_SIZE, DEFAULT_TABLE_BYTES) < DEFAULT_TABLE_BYTES:
            self.retire()  # the next headers must say that the table is smaller now, which libnghttp2 sees to

    # What goes

    def answer(self, stream: int, message: bytes) -> bool:
        """The only message of a call, and its good end; False where libnghttp2 has to see to it."""
        length = len(message) + PREFIX_BYTES
        granted = self.granted.pop(stream)
        if not self.is_open or length > self.spare or length > self._frame_bytes or length > self._stream_window + granted:
            self.granted[stream] = granted
            self.hand_over()
            self.is_open = False
            return False
        del self.calls[stream]
        if self._windows.answering:
            self._windows.answered(stream)
        self.spare -= length
        self.unsent += (
            _ANSWER(_BEGIN_HEAD, END_HEADERS, stream, _BEGIN, length << 8, 0, stream, 0, length - PREFIX_BYTES),
            message,
            _TRAILERS(_END_HEAD, END_HEADERS | END_STREAM, stream, _END),
        )
        return True

    def fail(self, stream: int, trailers: Headers, *, ended: bool) -> bool:
        """End a call without a message; False where libnghttp2 has to see to it. `ended` tells that the client has ended."""
        block = _BEGIN + literals(trailers)
        if not self.is_open or len(block) > self._frame_bytes:
            self.hand_over()
            return False
        del self.calls[stream], self.granted[stream]
        self.requests.forget(stream)
        self._windows.answered(stream)
        self.unsent.append(head_of(HEADERS, END_HEADERS | END_STREAM, stream, len(block)) + block)
        if not ended:
            self.unsent.append(rst_stream(stream, NO_ERROR))
        return True

    def explain(self, stream: int, trailers: Headers) -> None:
        """Answer a call that libnghttp2 is about to reset, which goes out behind this."""
        if not self.is_over:
            block = _BEGIN + literals(trailers)
            self.explained.append(head_of(HEADERS, END_HEADERS | END_STREAM, stream, len(block)) + block)

    def acknowledge(self) -> None:
        """Have the client send on, before the connection's window is too small: at once where libnghttp2 keeps some of it."""
        owed, windows = self.requests.owed, self._windows
        if owed and (owed > windows.acknowledge_at or windows.withhold) and not windows.is_held_up:
            self._pay()

    def relieve(self, *, paused: bool) -> bool:
        """Give libnghttp2 of the window what it is short of; whether it can send more now. The socket may be `paused`."""
        is_short = self._http2.queued_body_size() > 0
        self.is_open = self.spare > 0 and not is_short and not paused
        if paused or not is_short or not self.spare:
            return False
        self._give_window()
        return True

    def last_words(self, frames: bytes) -> bytes:
        """What libnghttp2 sends as it ends the connection; it is to name the last stream that was looked at, here or there."""
        if self.is_over:  # it knows of all
            return frames
        self._forget_all()
        return with_last_stream(frames, self.latest)

    def clear(self) -> None:
        """The connection is lost."""
        self._forget_all()
        self.unsent.clear()
        self.explained.clear()
        self.closed.clear()

    # To libnghttp2

    def hand_over(self) -> None:
        """Have libnghttp2 carry on all calls that are here."""
        if not self.granted:
            return
        requests, frames = self.requests, []
        for stream, granted in sorted(self.granted.items()):
            end = 0 if stream in requests.calls else END_STREAM
            block = _CALL
            if stream in requests.announced:  # it sees to it that so much comes
                block += literals([(CONTENT_LENGTH, b"%d" % requests.announced[stream])])
            frames.append(head_of(HEADERS, END_HEADERS | end, stream, len(block)) + block)
            if granted:
                frames.append(window_update(stream, granted))
            self.told = stream
        unfinished = dict(requests.growing)
        self.granted.clear()
        requests.clear()
        self._tell(b"".join(frames))
        for stream, growing in unfinished.items():
            call = self.calls[stream]
            call.receive(growing.so_far())
            self.unsent.append(window_update(stream, growing.came))
            self._windows.must_wait(stream, call.held_bytes)

    def retire(self) -> None:
        """Have libnghttp2 do everything from now on."""
        if self.is_over:
            return
        self.is_over = True
        self.known.clear()
        self.hand_over()
        frames = []
        if self.latest > self.told:  # it must not take what still comes for these as meant for streams that never were
            block = head_of(HEADERS, END_HEADERS | END_STREAM, self.latest, len(_CALL)) + _CALL
            frames = [block, rst_stream(self.latest, NO_ERROR)]
            self.told = self.latest
        if frames:
            self._tell(b"".join(frames))
        self._give_window()
        if self.requests.owed:
            self._pay()

    def _pay(self) -> None:
        """Let the client send again as much as has come."""
        self.unsent.append(window_update(0, self.requests.owed))
        self.requests.owed = 0

    def _give_window(self) -> None:
        """Let libnghttp2 have all of the connection's window that is left."""
        if self.spare:
            self._tell(window_update(0, self.spare))
            self.spare = 0

    def _tell(self, frames: bytes) -> None:
        """As if the client had sent them. What follows from them for calls has been seen to."""
        try:
            self._http2.receive_data(frames)
            events = self._http2.events()
        except NGH2Error:  # the connection is at its end already
            return
        self.closed += [event.stream_id for event in events if isinstance(event, StreamClosed | StreamReset)]

    def _forget_all(self) -> None:
        self.is_over = True
        self.known.clear()
        self.granted.clear()
        self.requests.clear()
