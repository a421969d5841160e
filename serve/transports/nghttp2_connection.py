"""One HTTP/2 connection on libnghttp2: bytes in, calls out; answers in, bytes out.

Nothing here waits: bytes that arrive become events, events go to the call they belong to, and what there is to send is written
at the end of the turn, so that all answers of a batch leave in one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from ngh2 import (
    Configuration,
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
    StreamReset,
    StreamUnavailableError,
    TrailersReceived,
    WindowUpdated,
)
from ngh2.exceptions import ConnectionClosingError, ConnectionStateError, NGH2Error

from serve.protocol.status import Status
from serve.transports.frame_reader import FrameReader
from serve.transports.grpc_framing import frame
from serve.transports.grpc_headers import OK_TRAILERS, RESPONSE, refusal, trailers_of
from serve.transports.http2_frames import (
    FRAME_BYTES,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    NO_ERROR,
)
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2_call import Call
from serve.transports.nghttp2_outlet import Outlet
from serve.transports.receive_windows import ReceiveWindows
from serve.transports.repeated_calls import Opener, RepeatedCalls

logger = logging.getLogger(__name__)

STREAM_GONE = (StreamClosed, StreamReset)
CANNOT_BE_ANSWERED = (StreamUnavailableError, ConnectionStateError, ConnectionClosingError)


OpenCall = Callable[["GrpcConnection", int], Call]
Route = Callable[[dict[bytes, bytes]], OpenCall]


class Owner(Protocol):
    """What a connection asks of its server."""

    @property
    def received(self) -> bytearray:
        """Memory for what a socket has to say."""

    def connected(self, connection: GrpcConnection) -> bool:
        """Take note of a new connection; False closes it."""

    def disconnected(self, connection: GrpcConnection) -> None:
        """Forget it."""

    def flush_soon(self, connection: GrpcConnection) -> None:
        """Have `connection.flush` called at the end of this turn of the loop."""


class GrpcConnection(asyncio.BufferedProtocol):
    """The server's side of one client connection."""

    def __init__(self, owner: Owner, route: Route, limits: TransportLimits) -> None:
        self._owner = owner
        self._route = route
        self.limits = limits
        self._headers: tuple[Header, ...] = ()  # of the latest call, which the next one mostly repeats
        self._open_call: OpenCall | None = None  # what they ask for
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._http2 = Connection(Role.SERVER, _configuration(limits))
        self._calls: dict[int, Call] = {}
        self._windows = ReceiveWindows(self._http2.acknowledge_received_data, limits.max_held_bytes)
        self._outlet = Outlet(self._http2, limits.max_unsent_bytes)
        self._repeated = RepeatedCalls(self._http2, self._calls, self._windows, limits)
        self._reader = FrameReader(self._repeated)
        self._receiving = self._has_more = self._closing = False
        self._loop = asyncio.get_running_loop()  # which asks the kernel who it is each time that somebody looks for it
        self.opened_s = self.heard_s = self._loop.time()
        self.greeted = False
        self.pinged_s: float | None = None

    @property
    def calls(self) -> int:
        """Calls in flight."""
        return len(self._calls)

    @property
    def peer(self) -> str:
        """The client's address."""
        if not self._peer and self._transport is not None:
            name = self._transport.get_extra_info("peername")
            host, port = name[:2] if isinstance(name, tuple) else ("unix", 0)
            self._peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self._peer

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet, or close when there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._owner.connected(self):
            self._transport.abort()
            return
        limits = self.limits
        self._http2.initiate_connection(
            {
                MAX_CONCURRENT_STREAMS: limits.max_streams,
                INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                MAX_FRAME_SIZE: FRAME_BYTES,
                MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
            }
        )
        self._http2.set_local_window_size(limits.connection_window_bytes)
        self.flush()

    def get_buffer(self, sizehint: int) -> bytearray:  # noqa: ARG002  (the signature is asyncio's)
        """Where the socket's bytes go. They are looked at before any other socket is, so all connections share it."""
        return self._owner.received

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self.data_received(memoryview(self._owner.received)[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Take bytes, hand them to their calls, answer what can be answered at once."""
        self.heard_s = self._loop.time()
        self._receiving = True
        try:
            has_more = self._reader.read(data, self)
        except NGH2Error as error:
            self._broken(error)
            return
        finally:
            self._receiving = False
        if has_more or self._has_more:
            self._pace(has_more)
        self.flush()

    def eof_received(self) -> bool:
        """The client will send nothing more, answers included that it would read: gRPC clients do not half-close."""
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  (the signature is asyncio's)
        """Every call in flight is without a client now."""
        self._transport = None
        self._owner.disconnected(self)
        for call in list(self._calls.values()):
            call.gone()
        self._calls.clear()
        self._repeated.clear()
        self._outlet.clear()

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        self._outlet.paused = True
        self._repeated.is_open = False

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._outlet.paused = False
        self.flush()

    # The reader's side

    def tell(self, data: bytes | memoryview) -> None:
        """Hand frames to libnghttp2, and what it makes of them to their calls."""
        self._http2.receive_data(data)
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

    def opener(self, stream: int) -> Opener | None:
        """What opened a call that libnghttp2 has just been told of, if others like it can be read without it."""
        call, open_call = self._calls.get(stream), self._open_call
        if call is None or open_call is None or not call.is_unary:
            return None
        return cast("Opener", partial(open_call, self))

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
            http2.send_response(stream, RESPONSE)
            http2.send_data(stream, frame(message))
            http2.send_trailers(stream, OK_TRAILERS)
        except CANNOT_BE_ANSWERED:
            pass  # reset by the client in this very turn, or the connection is being ended
        self._flush_soon()

    def begin(self, stream: int) -> None:
        """The headers of a call with any number of messages."""
        if stream in self._calls:
            with contextlib.suppress(*CANNOT_BE_ANSWERED):
                self._http2.send_response(stream, RESPONSE)
            self._flush_soon()

    def send(self, stream: int, message: bytes) -> None:
        """One message of such a call."""
        if stream in self._calls:
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
        """A call has read `size` bytes that `receive` kept back: the client may send as many."""
        if self._windows.give_back(stream, size):
            self._flush_soon()

    # The server's side

    def flush(self) -> None:
        """Write what there is to send, as far as the socket takes it."""
        transport = self._transport
        if transport is None:
            return
        repeated, outlet = self._repeated, self._outlet
        while repeated.closed:
            self._stream_gone(repeated.closed.pop())
        try:
            outlet.write(transport)
            if repeated.relieve(paused=outlet.paused):
                outlet.write(transport)
        except NGH2Error:
            self._give_up()
            return
        if repeated.unsent and not outlet.paused:
            transport.write(b"".join(repeated.unsent))
            repeated.unsent.clear()
        if not (self._http2.want_read or self._http2.want_write or repeated.granted):
            transport.close()

    def reroute(self) -> None:
        """Find out anew what calls get that begin as earlier ones did: it may be something else now."""
        self._open_call = None
        self._repeated.known.clear()

    def ping(self) -> None:
        """Ask whether the other side still lives."""
        self.pinged_s = self._loop.time()
        self._http2.ping()
        self.flush()

    def go_away(self) -> None:
        """Take no new calls, and say so."""
        if not self._closing and self._transport is not None:
            self._closing = True
            self._repeated.retire()
            self.flush()
            self._http2.send_goaway(NO_ERROR)
            self.flush()

    def close(self) -> None:
        """End the connection once what was answered is out."""
        if self._transport is not None:
            self.flush()
            if self._transport is not None:
                self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def give_up_stalled(self, before_s: float) -> None:
        """End the calls whose unfinished message has not grown since `before_s`, on the loop's clock."""
        for call in list(self._calls.values()):
            call.give_up_stalled(before_s)

    def _pace(self, has_more: bool) -> None:
        """Leave the rest of much that has come for another turn, and the socket with it, so that batches get theirs."""
        transport, had_more = self._transport, self._has_more
        if transport is None:
            return
        self._has_more = has_more
        if has_more:
            if not had_more:
                transport.pause_reading()
            self._loop.call_soon(self._read_on)
        else:
            transport.resume_reading()

    def _read_on(self) -> None:
        if self._has_more and self._transport is not None:
            self.data_received(b"")

    def _request(self, event: RequestReceived) -> None:
        stream, headers, open_call = event.stream_id, event.headers, self._open_call
        if open_call is None or headers != self._headers:
            fields = dict(headers)
            refused = refusal(fields)
            if refused is not None:
                with contextlib.suppress(*CANNOT_BE_ANSWERED):
                    self._http2.send_response(stream, refused, end_stream=True)
                if not event.end_stream:
                    self._outlet.reset_when_out(stream)
                return
            open_call = self._route(fields)
            self._headers, self._open_call = headers, open_call
        call = open_call(self, stream)
        self._calls[stream] = call
        if event.end_stream:
            call.end()

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

    def _flush_soon(self) -> None:
        if not self._receiving:
            self._owner.flush_soon(self)

    def _broken(self, error: NGH2Error) -> None:
        logger.info("a connection broke HTTP/2: %s", error)
        self._give_up()

    def _give_up(self) -> None:
        """Say why, if that is still possible, and close."""
        transport = self._transport
        if transport is None:
            return
        with contextlib.suppress(NGH2Error):
            transport.write(self._http2.data_to_send())
        transport.close()


def _configuration(limits: TransportLimits) -> Configuration:
    return Configuration(
        auto_window_update=False,
        max_inbound_header_list_size=limits.max_header_bytes,
        stream_reset_rate_limit=(limits.reset_burst, limits.resets_per_s),
    )
