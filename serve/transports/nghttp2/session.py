"""The calls of one HTTP/2 connection, and libnghttp2: its events go to the call that they belong to, a call's answer to it.

Nothing here knows of sockets or of time: bytes come in by way of `tell`, and leave when the connection looks for what is to be
sent, so that all answers of a batch leave in one write.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, cast

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
from ngh2.exceptions import ConnectionClosingError, ConnectionStateError, DenialOfServiceError, NGH2Error

from serve.engine.errors import InvalidArgumentError, RateLimitedError
from serve.protocol.status import Status, status_of
from serve.security.memory_budget import MemoryBudget, Share
from serve.transports.grpc_framing import frame
from serve.transports.grpc_headers import OK_TRAILERS, RESPONSE, Headers, oversize, refusal, trailers_of
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.bounds import configuration, greeting
from serve.transports.nghttp2.call import Call, UnaryCall
from serve.transports.nghttp2.message_turns import MessageTurns
from serve.transports.nghttp2.outlet import Outlet
from serve.transports.nghttp2.receive_windows import ReceiveWindows
from serve.transports.nghttp2.repeated_calls import CONTENT_LENGTH, Known, RepeatedCalls

STREAM_GONE = (StreamClosed, StreamReset)
TOO_MUCH = "too much of large requests has come at once on this connection; send fewer at a time"
TRY_AGAIN_S = 1.0
FULL = "the server holds as many requests and unread answers as it may (--max-buffered-mib); retry with back-off"
UNREAD = "the answers of this connection are not read as they come; read them, or have fewer requests in flight"
LARGE_BYTES = 16_384  # what is smaller is not counted on its way: the queues bound it, and its count would cost too much
FREE_CALLS = 64  # in flight on one connection, whose own memory is not counted
CALL_BYTES = 2048  # of memory that each call in flight takes, whatever it brings
STREAM_BYTES = 16 * 1024  # of one with any number of messages: its task and timer too, and what the heap keeps beside them
WRONG_HEADERS = (
    "HTTP/2 does not allow one of the call's headers; expected names in lower case, and values that neither begin nor end "
    "with a space"
)
NOTICE = b"elsewhen"  # what a client answers once it has read that it is to go; eight bytes
AT_ITS_END = (ConnectionStateError, ConnectionClosingError)  # what libnghttp2 says of a connection
CANNOT_BE_ANSWERED = (StreamProtocolError, *AT_ITS_END)

Asked = ParamSpec("Asked")
OpenCall = Callable[["GrpcSession", int], Call]
Route = Callable[[Sequence[Header], Share], OpenCall]


def unless_ended(ask: Callable[Asked, None]) -> Callable[Asked, None]:
    """Ask libnghttp2, which refuses once a connection has ended. Calls ask at any time: timers, models and tasks go on."""

    def asked(*args: Asked.args, **named: Asked.kwargs) -> None:
        with contextlib.suppress(*AT_ITS_END):
            ask(*args, **named)

    return asked


class GrpcSession(ABC):
    """One connection's calls.

    Attributes:
        limits: of the connection.
        share: of the memory that all connections may take.
        turns: in which its streams read what has come.
        heard_s: when the client last sent something, on the loop's clock.
        greeted: the client has sent its settings.
        pinged_s: when the client was asked whether it still lives, if it has not answered that.
    """

    heard_s: float
    pinged_s: float | None = None
    greeted = False

    def __init__(self, route: Route, limits: TransportLimits, budget: MemoryBudget) -> None:
        self._route = route
        self.limits = limits
        self.share = budget.share(is_known=False, press=self._press, go_on=self._go_on)
        self.turns = MessageTurns()
        self._headers: tuple[Header, ...] = ()  # of the latest call, which the next one mostly repeats
        self._open_call: OpenCall | None = None  # what they ask for
        self._http2 = Connection(Role.SERVER, configuration(limits))
        self._calls: dict[int, Call] = {}
        acknowledge, widen = (
            unless_ended(self._http2.acknowledge_received_data),
            unless_ended(self._http2.set_local_window_size),
        )
        self._windows = ReceiveWindows(acknowledge, widen, limits, self.share)
        self._repeated = RepeatedCalls(self._http2, self._calls, self._windows, limits, self.share)
        self._outlet = Outlet(self._http2, limits.max_unsent_bytes, self._repeated.last_words, self.share)
        self._counted_calls = 0  # in flight, by how many `share` knows of them
        self._begun = 0  # the latest stream whose headers were right
        self._refused = 0  # calls that `max_refused` counts
        self._closing = False

    @property
    @abstractmethod
    def peer(self) -> str:
        """The client's address."""

    @property
    def calls(self) -> int:
        """Calls in flight."""
        return len(self._calls)

    @abstractmethod
    def _flush_soon(self) -> None:
        """Have what is to be sent written at the end of this turn of the loop."""

    @abstractmethod
    def _notice_read(self) -> None:
        """The client knows that its next calls are to go elsewhere; those that it sent before have come."""

    @abstractmethod
    def _too_much(self) -> None:
        """The client sends too much of what is refused: take no new calls."""

    def greet(self) -> None:
        """Say what the client may do."""
        self._http2.initiate_connection(greeting(self.limits))

    def reroute(self) -> None:
        """Find out anew what calls get that begin as earlier ones did: it may be something else now."""
        self._open_call = None
        self._repeated.known.clear()

    def give_up_stalled(self, before_s: float) -> None:
        """End the calls whose unfinished message has not grown since `before_s`, on the loop's clock."""
        for call in list(self._calls.values()):
            call.give_up_stalled(before_s)

    def _count_calls(self) -> None:
        """Count what the calls in flight take themselves."""
        calls = len(self._calls) // FREE_CALLS * FREE_CALLS
        self.share.add((calls - self._counted_calls) * CALL_BYTES)
        self._counted_calls = calls
        if self.share.is_too_much:
            self._press()

    def _press(self) -> None:
        """Give up the latest calls, as far as this connection holds more than its part of a budget that is spent."""
        for call in reversed(list(self._calls.values())):
            if not self.share.excess:
                return
            call.give_up(_full())

    def _go_on(self) -> None:
        """It is this connection's turn to send what memory was too short for."""
        self._windows.let_oldest_go_on()
        self._flush_soon()

    def _end_all(self) -> None:
        """Every call in flight is without a client now."""
        for call in list(self._calls.values()):
            call.gone()
        self._calls.clear()
        self._repeated.clear()
        self._outlet.clear()
        self.share.close()

    # The reader's side

    def tell(self, data: bytes | memoryview) -> None:
        """Hand frames to libnghttp2, and what it makes of them to their calls."""
        self._http2.receive_data(data)
        self._take_events()

    def _take_events(self) -> None:
        for event in self._http2.events():
            if isinstance(event, DataReceived):
                self._data(event)
            elif isinstance(event, RequestReceived):
                self._request(event)
            elif isinstance(event, WindowUpdated):  # libnghttp2 sees to them
                continue
            elif isinstance(event, STREAM_GONE):
                self._stream_gone(event.stream_id)
            elif isinstance(event, TrailersReceived):
                call = self._calls.get(event.stream_id)
                if call is not None:
                    call.end()
            else:
                self._connection_event(event)

    def known(self, stream: int) -> Known | None:
        """What is known of a call that libnghttp2 has just been told of, if others like it can be read without it."""
        call, open_call = self._calls.get(stream), self._open_call
        if call is None or open_call is None or not call.is_unary:
            return None
        length = dict(self._headers).get(CONTENT_LENGTH)  # libnghttp2 has seen that it is one number
        return Known(cast("Callable[[int], UnaryCall]", partial(open_call, self)), None if length is None else int(length))

    def explain(self, stream: int) -> None:
        """Say why a call is about to be reset that libnghttp2 has just been told of, if it is for its headers."""
        if stream <= self._begun:
            return
        try:
            self._http2.stream_remote_window_size(stream)
        except NGH2Error:  # it has no such stream: there are too many, or the connection ends
            return
        self._repeated.explain(stream, trailers_of(status_of(InvalidArgumentError(WRONG_HEADERS))))

    # The calls' side

    def answer(self, stream: int, message: bytes) -> None:
        """The only message of a call, and its good end."""
        if stream in self._repeated.granted and self._repeated.answer(stream, message):
            self._flush_soon()
            return
        if self._forget(stream) is None:
            return
        http2 = self._http2
        try:
            if self._outlet.add(len(message)):
                http2.send_response(stream, RESPONSE)
                http2.send_data(stream, frame(message))
                http2.send_trailers(stream, OK_TRAILERS)
            else:
                http2.send_response(stream, RESPONSE + trailers_of(status_of(_unread())), end_stream=True)
        except CANNOT_BE_ANSWERED:
            pass  # reset by the client in this very turn, or the connection is being ended
        self._flush_soon()

    def check_room(self, stream: int) -> None:
        """Check that the message that has come for a call may be kept until it is answered.

        Raises:
            RateLimitedError: the server holds too much already, and this connection more than others.
        """
        if self.share.is_too_much and not self._windows.is_oldest(stream):
            raise _full()

    def hold(self, stream: int, size: int, *, is_last: bool = False) -> None:
        """Count so many bytes for a call until it is answered; `is_last`: the client sends no more on it."""
        self._windows.answer_later(stream, size, is_last=is_last)

    def begin(self, stream: int) -> None:
        """The headers of a call with any number of messages."""
        if stream in self._calls:
            with contextlib.suppress(*CANNOT_BE_ANSWERED):
                self._http2.send_response(stream, RESPONSE)
            self._flush_soon()

    def send(self, stream: int, message: bytes) -> None:
        """One message of such a call."""
        call = self._calls.get(stream)
        if call is not None and not self._outlet.add(len(message)):
            call.give_up(_unread())
        elif call is not None:
            with contextlib.suppress(*CANNOT_BE_ANSWERED):
                self._http2.send_data(stream, frame(message))
            self._flush_soon()

    def is_behind(self, stream: int) -> bool:
        """Whether the client reads a call's answers more slowly than they come."""
        return stream in self._calls and self._outlet.is_behind(stream)

    def when_read(self, stream: int, then: Callable[[], None]) -> None:
        """Call `then` once, when a client that is behind has caught up or has gone."""
        self._outlet.when_read(stream, then)

    def finish(self, stream: int, *, ended: bool) -> None:
        """The good end of such a call; `ended` tells that the client has ended it on its side."""
        self._end(stream, lambda: self._http2.send_trailers(stream, OK_TRAILERS), ended=ended)

    def fail(self, stream: int, status: Status, *, ended: bool, begun: bool = False) -> None:
        """End a call with a status; `begun` tells that its headers have gone out, `ended` that the client has ended."""
        trailers = trailers_of(status)
        if stream in self._repeated.granted and self._repeated.fail(stream, trailers, ended=ended):
            self._flush_soon()
        elif begun:
            self._end(stream, lambda: self._http2.send_trailers(stream, trailers), ended=ended)
        else:
            self._end(stream, lambda: self._http2.send_response(stream, RESPONSE + trailers, end_stream=True), ended=ended)

    def give_back(self, stream: int, size: int) -> None:
        """A call has read `size` bytes that `receive` kept back: the client may send as many, unless others come first."""
        call = self._calls.get(stream)
        if call is None or not self._windows.must_wait(stream, call.held_bytes):
            self._windows.give_back(stream, size)
        self._flush_soon()

    # What libnghttp2 tells

    def _request(self, event: RequestReceived) -> None:
        stream, headers, open_call = event.stream_id, event.headers, self._open_call
        self._begun = stream
        if open_call is None or headers != self._headers:
            too_large = oversize(headers, self.limits.max_header_bytes)
            refused = too_large or refusal(dict(headers))
            if refused is not None:
                self._refuse(stream, refused, ended=event.end_stream)
                if too_large is not None and self._refused_again():
                    self._too_much()
                return
            was_known = self.share.is_known
            open_call = self._route(headers, self.share)
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
        """Count a call that was refused; whether there have been too many."""
        self._refused += 1
        return self._refused == self.limits.max_refused

    def _refuse(self, stream: int, headers: Headers, *, ended: bool) -> None:
        """Answer a call that is not opened."""
        with contextlib.suppress(*CANNOT_BE_ANSWERED):
            self._http2.send_response(stream, headers, end_stream=True)
        if not ended:
            self._outlet.reset_when_out(stream)

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
        self._outlet.closed(stream)
        self._windows.closed(stream)
        call = self._calls.pop(stream, None)
        if call is not None:
            call.gone()

    def _connection_event(self, event: Event) -> None:
        if isinstance(event, SettingsReceived):
            self.greeted = True
            self._repeated.settings(event.settings)
        elif isinstance(event, PingAcknowledged):
            self.pinged_s = None
            if event.opaque_data == NOTICE:
                self._notice_read()
        elif isinstance(event, ConnectionClosed):
            self._closing = True

    def _end(self, stream: int, send: Callable[[], None], *, ended: bool) -> None:
        if self._forget(stream) is None:
            return
        try:
            send()
        except CANNOT_BE_ANSWERED:
            return
        if not ended:
            self._outlet.reset_when_out(stream)
        self._flush_soon()


def _full() -> RateLimitedError:
    return RateLimitedError(FULL, retry_after_s=TRY_AGAIN_S)


def _unread() -> RateLimitedError:
    return RateLimitedError(UNREAD, retry_after_s=TRY_AGAIN_S)
