"""The calls of one HTTP/2 connection: libnghttp2's events go to their calls, responses to libnghttp2.

Independent of sockets and time: bytes enter through `feed` and leave when the connection looks for pending data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

from ngh2 import (
    Connection,
    ConnectionClosed,
    DataReceived,
    Event,
    Header,
    PingAcknowledged,
    RequestReceived,
    Role,
    SettingsReceived,
    StreamClosed,
    StreamProtocolError,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from ngh2.exceptions import DenialOfServiceError, NGH2Error

from halfserve.serve.engine.errors import InvalidArgumentError, RateLimitedError
from halfserve.serve.protocol.status import Status, status_of
from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.grpc_framing import (
    LARGE_MESSAGE_BYTES,
    OK_TRAILERS,
    PREFIX,
    RESPONSE,
    Headers,
    frame,
    oversize,
    refusal,
    trailers_of,
)
from halfserve.serve.transports.nghttp2.fairness import MessageQuota, TransportLimits, configuration, greeting
from halfserve.serve.transports.nghttp2.fast_path import CONTENT_LENGTH, CallTemplate, FastPath
from halfserve.serve.transports.nghttp2.flow_control import AT_ITS_END, ReceiveWindows
from halfserve.serve.transports.nghttp2.frames import ENHANCE_YOUR_CALM
from halfserve.serve.transports.nghttp2.pending_requests import Call, UnaryCall
from halfserve.serve.transports.nghttp2.wire import LOST, SessionOwner, Wire

STREAM_GONE: Final = (StreamClosed, StreamReset)
TOO_MUCH: Final = "too much of large requests has come at once on this connection; send fewer at a time"
TRY_AGAIN_S: Final = 1.0
FULL: Final = "the server holds as many requests and unread answers as it may (--max-buffered-mib); retry with back-off"
UNREAD: Final = "the answers of this connection are not read as they come; read them, or have fewer requests in flight"
LARGE_BYTES: Final = 16_384  # smaller requests are not counted: queue limits bound them, and counting costs too much
FREE_CALLS: Final = 64  # calls in flight on one connection whose own memory is not counted
CALL_BYTES: Final = 2048  # memory per call in flight, besides its request
STREAM_BYTES: Final = 16 * 1024  # memory per streaming call, with task, timer and heap overhead
WRONG_HEADERS: Final = (
    "HTTP/2 does not allow one of the call's headers; expected names in lower case, and values that neither begin nor end "
    "with a space"
)
NOTICE: Final = b"elsewhen"  # payload of the ping whose answer shows that the client has read the notice; eight bytes
CANNOT_BE_ANSWERED: Final = (StreamProtocolError, *AT_ITS_END)

OpenCall = Callable[["GrpcSession", int], Call]
Route = Callable[[Sequence[Header], "GrpcSession"], OpenCall]


class GrpcSession:
    """The calls of one connection, and libnghttp2's side of it.

    Attributes:
        heard_s: when the client last sent something, on the loop's clock.
        pinged_s: when an unanswered ping was sent; None without one.
        greeted: whether the client has sent its settings.
        has_ended: whether the connection was ended, by either side, with GOAWAY.
        wire, fast_path: the parts that the calls share with their connection.
    """

    def __init__(self, owner: SessionOwner, route: Route, limits: TransportLimits, share: MemoryShare) -> None:
        """Make a session without calls; `share` counts the memory of its calls."""
        self._owner = owner
        self._route = route
        self.heard_s = 0.0
        self.pinged_s: float | None = None
        self.greeted = self.has_ended = False
        self.limits = limits
        self.share = share
        self.quota = MessageQuota()
        self._headers: tuple[Header, ...] = ()  # headers of the latest call, mostly repeated by the next
        self._open_call: OpenCall | None = None  # for these headers
        self.http2 = Connection(Role.SERVER, configuration(limits))
        self._calls: dict[int, Call] = {}
        self._windows = ReceiveWindows(self.http2, limits, share)
        self.fast_path = FastPath(self.http2, self._calls, self._windows, limits, share)
        self.wire = Wire(self.http2, limits.max_unsent_bytes, self.fast_path.last_words, share)
        self._counted_calls = 0  # calls in flight as reported to `share`
        self._latest_valid = 0  # the latest stream with valid headers
        self._refused = 0  # calls that `max_refused` counts
        self._has_fed = False  # libnghttp2 has read something since the latest bytes came

    @property
    def peer(self) -> str:
        """The client's address."""
        return self.wire.peer

    @property
    def calls(self) -> int:
        """Number of calls in flight."""
        return len(self._calls)

    @property
    def has_news(self) -> bool:
        """Whether a flush may have something to do."""
        return self._has_fed or len(self._calls) >= FREE_CALLS or self.fast_path.has_news

    def greet(self) -> None:
        """Send SETTINGS."""
        self.http2.initiate_connection(greeting(self.limits))

    def reroute(self) -> None:
        """Drop cached routes."""
        self._open_call = None
        self.fast_path.templates.clear()

    def give_up_stalled(self, before_s: float) -> None:
        """End calls whose unfinished message has not grown since `before_s`, on the loop's clock."""
        for call in list(self._calls.values()):
            call.give_up_stalled(before_s)

    def count_calls(self) -> bool:
        """Count the memory of the calls themselves; returns whether it is too much."""
        if len(self._calls) < FREE_CALLS and not self._counted_calls:
            return False
        calls = len(self._calls) // FREE_CALLS * FREE_CALLS
        self.share.add((calls - self._counted_calls) * CALL_BYTES)
        self._counted_calls = calls
        return self.share.is_too_much

    def shed_calls(self) -> None:
        """Give up the latest calls, as far as this connection exceeds its share of an exhausted budget."""
        for call in reversed(list(self._calls.values())):
            if not self.share.excess:
                return
            call.give_up(_full())

    def resume_oldest(self) -> None:
        """Continue the message that waited for memory."""
        self._windows.resume_oldest()
        self._owner.flush_soon()

    def end_all(self) -> None:
        """Cancel every call in flight."""
        for call in list(self._calls.values()):
            call.gone()
        self._calls.clear()
        self._owner = LOST
        self.fast_path.clear()
        self.wire.clear()
        self.share.close()

    # Frame handler

    def feed(self, data: bytes | memoryview) -> None:
        """Hand frames to libnghttp2, and its events to their calls."""
        self._has_fed = True
        self.http2.receive_data(data)
        self.take_events()

    def heard(self, now_s: float) -> None:
        """Note that bytes came."""
        self.heard_s = now_s
        self._has_fed = False

    def end_closed(self) -> None:
        """End the calls whose streams libnghttp2 closed while it took them over."""
        closed = self.fast_path.closed
        while closed:
            self._stream_gone(closed.pop())

    def take_events(self) -> None:
        """Hand libnghttp2's events to their calls."""
        for event in self.http2.events():
            if isinstance(event, DataReceived):
                self._data(event)
            elif isinstance(event, RequestReceived):
                self._request(event)
            elif isinstance(event, WindowUpdated):  # handled by libnghttp2
                continue
            elif isinstance(event, STREAM_GONE):
                self._stream_gone(event.stream_id)
            elif isinstance(event, TrailersReceived):
                call = self._calls.get(event.stream_id)
                if call is not None:
                    call.end()
            else:
                self._connection_event(event)

    def template_of(self, stream: int) -> CallTemplate | None:
        """Return the template of a call that libnghttp2 just opened, if the fast path can open others like it."""
        call, open_call = self._calls.get(stream), self._open_call
        if call is None or open_call is None or not call.is_unary:
            return None
        length = dict(self._headers).get(CONTENT_LENGTH)  # libnghttp2 has checked that it is a number
        return CallTemplate(
            cast("Callable[[int], UnaryCall]", partial(open_call, self)), None if length is None else int(length)
        )

    def explain(self, stream: int) -> None:
        """Answer a call that libnghttp2 will reset for its headers."""
        if stream <= self._latest_valid:
            return
        try:
            self.http2.stream_remote_window_size(stream)
        except NGH2Error:  # no such stream: too many streams, or the connection ends
            return
        self.fast_path.explain(stream, trailers_of(status_of(InvalidArgumentError(WRONG_HEADERS))))

    # For calls

    def answer(self, stream: int, message: bytes) -> None:
        """Send the only response of a call, with status OK."""
        if self.fast_path.answer(stream, message):
            self._owner.flush_soon(is_last=not self._calls)
            return
        if self._forget(stream) is None:
            return
        http2 = self.http2
        try:
            if self.wire.add(len(message)):
                http2.send_response(stream, RESPONSE)
                self._send_message(stream, message)
                http2.send_trailers(stream, OK_TRAILERS)
            else:
                http2.send_response(stream, RESPONSE + trailers_of(status_of(_unread())), end_stream=True)
        except CANNOT_BE_ANSWERED:
            pass  # reset by the client in this iteration, or the connection is ending
        self._owner.flush_soon()

    def check_room(self, stream: int) -> None:
        """Check that a call's message may be kept until its response.

        Raises:
            RateLimitedError: memory is exhausted, and this connection exceeds its share.
        """
        if self.share.is_too_much and not self._windows.is_oldest(stream):
            raise _full()

    def hold(self, stream: int, size: int, *, is_last: bool = False) -> None:
        """Count `size` bytes for a call until its response; `is_last`: its request is complete."""
        self._windows.answer_later(stream, size, is_last=is_last)

    def begin(self, stream: int) -> None:
        """Send the response headers of a streaming call."""
        if stream in self._calls:
            with contextlib.suppress(*CANNOT_BE_ANSWERED):
                self.http2.send_response(stream, RESPONSE)
            self._owner.flush_soon()

    def send(self, stream: int, message: bytes) -> None:
        """Send one message of a streaming call."""
        call = self._calls.get(stream)
        if call is not None and not self.wire.add(len(message)):
            call.give_up(_unread())
        elif call is not None:
            with contextlib.suppress(*CANNOT_BE_ANSWERED):
                self._send_message(stream, message)
            self._owner.flush_soon()

    def _send_message(self, stream: int, message: bytes) -> None:
        """Have libnghttp2 send a message with its prefix."""
        if len(message) < LARGE_MESSAGE_BYTES:
            self.http2.send_data(stream, frame(message))
        else:
            self.http2.send_data(stream, PREFIX.pack(0, len(message)))
            self.http2.send_data(stream, message)

    def is_behind(self, stream: int) -> bool:
        """Return whether the client reads a call's responses more slowly than they are produced."""
        return stream in self._calls and self.wire.is_behind(stream)

    def when_read(self, stream: int, then: Callable[[], None]) -> None:
        """Call `then` once, when a slow client has caught up or gone."""
        self.wire.when_read(stream, then)

    def finish(self, stream: int, *, ended: bool) -> None:
        """End a streaming call with status OK; `ended`: the client has ended its side."""
        self._end(stream, OK_TRAILERS, ended=ended, headers_sent=True)

    def fail(self, stream: int, status: Status, *, ended: bool, headers_sent: bool = False) -> None:
        """End a call with a status; `headers_sent`: its response headers have left, `ended`: the client has ended its side."""
        trailers = trailers_of(status)
        if self.fast_path.fail(stream, trailers, ended=ended):
            self._owner.flush_soon()
        else:
            self._end(stream, trailers, ended=ended, headers_sent=headers_sent)

    def give_back(self, stream: int, size: int) -> None:
        """Acknowledge `size` bytes that `receive` withheld, unless other messages come first."""
        call = self._calls.get(stream)
        if call is None or not self._windows.must_wait(stream, call.held_bytes):
            self._windows.give_back(stream, size)
        self._owner.flush_soon()

    # Events of libnghttp2

    def _request(self, event: RequestReceived) -> None:
        stream, headers, open_call = event.stream_id, event.headers, self._open_call
        self._latest_valid = stream
        if open_call is None or headers != self._headers:
            too_large = oversize(headers, self.limits.max_header_bytes)
            refused = too_large or refusal(dict(headers))
            if refused is not None:
                self._refuse(stream, refused, ended=event.end_stream)
                if too_large is not None and self._refused_again():
                    self._owner.go_away_soon(ENHANCE_YOUR_CALM)
                return
            was_known = self.share.is_known
            open_call = self._route(headers, self)
            if self.share.is_known and not was_known:
                self._windows.open(min(self.limits.connection_window_bytes, self.share.window_bytes))
            self._headers, self._open_call = headers, open_call
        if self.share.is_too_much:
            trailers = trailers_of(status_of(_full()))
            self._refuse(stream, RESPONSE + trailers, ended=event.end_stream)
            if not self.share.is_known and self._refused_again():
                raise DenialOfServiceError("calls without a token that memory is too short for")
            return
        call = open_call(self, stream)
        self._calls[stream] = call
        if not call.is_unary:
            self.hold(stream, STREAM_BYTES)
        if event.end_stream:
            call.end()

    def _refused_again(self) -> bool:
        """Count a refused call; whether the limit is reached."""
        self._refused += 1
        return self._refused == self.limits.max_refused

    def _refuse(self, stream: int, headers: Headers, *, ended: bool) -> None:
        """Answer a call that is not opened."""
        with contextlib.suppress(*CANNOT_BE_ANSWERED):
            self.http2.send_response(stream, headers, end_stream=True)
        if not ended:
            self.wire.reset_when_out(stream)

    def _data(self, event: DataReceived) -> None:
        stream, data = event.stream_id, event.data
        call = self._calls.get(stream)
        size = len(data)
        if call is None:
            free = size
        elif event.end_stream:
            free = call.receive_last(data)
        else:
            free = call.receive(data)
            if self._windows.must_wait(stream, call.held_bytes):
                if self._windows.is_too_much:
                    text = FULL if self.share.is_too_much else TOO_MUCH
                    call.give_up(RateLimitedError(text, retry_after_s=TRY_AGAIN_S))
                else:
                    free = 0
        self._windows.took(stream, size, free)

    def _forget(self, stream: int) -> Call | None:
        self._windows.answered(stream)
        return self._calls.pop(stream, None)

    def _stream_gone(self, stream: int) -> None:
        self.wire.closed(stream)
        self._windows.closed(stream)
        call = self._calls.pop(stream, None)
        if call is not None:
            call.gone()

    def _connection_event(self, event: Event) -> None:
        if isinstance(event, SettingsReceived):
            self.greeted = True
            self.fast_path.settings(event.settings)
        elif isinstance(event, PingAcknowledged):
            self.pinged_s = None
            if event.opaque_data == NOTICE:
                self._owner.go_away_soon()  # its earlier calls have arrived
        elif isinstance(event, ConnectionClosed):
            self.has_ended = True

    def _end(self, stream: int, trailers: Headers, *, ended: bool, headers_sent: bool) -> None:
        if self._forget(stream) is None:
            return
        try:
            if headers_sent:
                self.http2.send_trailers(stream, trailers)
            else:
                self.http2.send_response(stream, RESPONSE + trailers, end_stream=True)
        except CANNOT_BE_ANSWERED:
            return
        if not ended:
            self.wire.reset_when_out(stream)
        self._owner.flush_soon()


def _full() -> RateLimitedError:
    return RateLimitedError(FULL, retry_after_s=TRY_AGAIN_S)


def _unread() -> RateLimitedError:
    return RateLimitedError(UNREAD, retry_after_s=TRY_AGAIN_S)
