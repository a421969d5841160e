"""One client connection: its socket, its session with the client's calls, and their fast path.

Received bytes are read at once; pending data is written at the end of a loop iteration, so that all responses of a batch leave
in one write. Nothing here waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol, cast

from ngh2.exceptions import ConnectionStateError, DenialOfServiceError, NGH2Error

from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.transports.nghttp2.fairness import TransportLimits, most_header_bytes
from halfserve.serve.transports.nghttp2.frame_reader import DiscardingReader, FrameReader
from halfserve.serve.transports.nghttp2.frames import ENHANCE_YOUR_CALM, NO_ERROR, goaway
from halfserve.serve.transports.nghttp2.session import NOTICE, GrpcSession, Route
from halfserve.serve.transports.nghttp2.wire import SessionOwner, is_at_its_end
from halfserve.serve.transports.read_scheduler import SMALL_BYTES, ReadScheduler

LAST_WORD_S = 1.0  # for a client that broke the protocol to read why its connection ends


class ConnectionServer(Protocol):
    """The server, as its connections see it."""

    @property
    def received(self) -> bytearray: ...  # the receive buffer that all connections share
    def connected(self, connection: GrpcConnection) -> None: ...
    def disconnected(self, connection: GrpcConnection) -> None: ...
    def unread(self, size: int) -> None: ...  # a connection ended with `size` bytes of responses unread
    def broken(self, error: NGH2Error) -> None: ...  # a client violated HTTP/2
    @property
    def budget(self) -> MemoryBudget: ...  # memory for all connections
    @property
    def read_scheduler(self) -> ReadScheduler: ...

    def flush_soon(self, connection: GrpcConnection) -> None:
        """Have `connection.flush` called at the end of this loop iteration."""

    def flush_last(self, connection: GrpcConnection) -> None:
        """Call `connection.flush` now: the response is to the connection's last call in flight, and no other will join it."""

    def sent(self, connection: GrpcConnection) -> None: ...  # a connection that takes no new calls may have written data


class GrpcConnection(SessionOwner):
    """The server's side of one client connection.

    Attributes:
        session: the calls of the client.
        unflushed: responses since the latest flush.
        goes: it takes no new calls.
        opened_s: when it was opened, on the loop's clock.
    """

    def __init__(self, server: ConnectionServer, route: Route, limits: TransportLimits) -> None:
        self._server, self._scheduler = server, server.read_scheduler
        share = server.budget.share(is_known=False, press=self._shed_calls, go_on=self._resume_oldest)
        self.session = GrpcSession(self, route, limits, share)
        self._wire, self._fast_path, self._http2 = self.session.wire, self.session.fast_path, self.session.http2
        self._limits, self._share = limits, share
        self._reader: FrameReader | DiscardingReader = FrameReader(self.session, most_header_bytes(limits))
        self.unflushed = 0
        self.goes = self._receiving = self._has_more = self._has_notice = False
        self.loop = asyncio.get_running_loop()  # kept: get_running_loop() makes a system call
        self.opened_s = self.session.heard_s = self.loop.time()

    @property
    def has_unsent(self) -> bool:
        """Whether responses have not left yet."""
        return self._wire.has_unsent

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire.transport = cast("asyncio.Transport", transport)
        self._server.connected(self)
        self.session.greet()
        self.flush()

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:  # noqa: ARG002  (the signature is asyncio's)
        """Return the buffer to read the socket into; its bytes are used before any other socket is read."""
        received = self._server.received
        if not self._scheduler.has_begun_turn:
            return received
        size = self._scheduler.receive_bytes(self, len(received))
        return received if size == len(received) else memoryview(received)[:size]

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(memoryview(self._server.received)[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Read bytes, hand them to their calls, and write immediate responses."""
        session = self.session
        session.heard(self.loop.time())
        if len(data) > SMALL_BYTES and self._scheduler.must_wait(self, len(data)):
            self._reader.keep(data)
            self._pace(has_more=True)
            return
        self._receiving = True
        try:
            has_more = self._reader.read(data)
        except NGH2Error as error:
            if not (self.goes and isinstance(error, ConnectionStateError) and is_at_its_end(self._http2)):
                self._broken(error)
                return
            has_more = False  # the connection ended within these bytes
        finally:
            self._receiving = False
        if has_more or self._has_more:
            self._pace(has_more=has_more)
        if self.unflushed or self.goes or session.has_news:
            self.flush()

    def read_on(self) -> None:
        """Read more of the bytes left for another loop iteration."""
        if self._has_more and self._wire.transport is not None:
            self.data_received(b"")

    def eof_received(self) -> bool:
        """Close: gRPC clients do not half-close connections."""
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  (the signature is asyncio's)
        self._wire.transport = None
        self._server.disconnected(self)
        self.session.end_all()

    def pause_writing(self) -> None:
        self._wire.is_paused = True
        self._fast_path.pause()

    def resume_writing(self) -> None:
        if not self._wire.has_left:
            self._wire.is_paused = False
            self.flush()

    # The session's side

    def flush_soon(self, *, is_last: bool = False) -> None:
        self.unflushed += 1
        if self.unflushed == 1 and not self._receiving:
            if is_last:
                self._server.flush_last(self)
            else:
                self._server.flush_soon(self)

    def go_away_soon(self, code: int = NO_ERROR) -> None:
        self.loop.call_soon(self.go_away, code)  # not while reading

    # The server's side

    def flush(self) -> None:
        """Write pending data, as far as the socket takes it."""
        self.unflushed = 0
        wire, fast_path, http2 = self._wire, self._fast_path, self._http2
        transport = wire.transport
        if transport is None or wire.has_left:
            return
        if fast_path.closed:
            self.session.end_closed()
        # First: libnghttp2 may acknowledge new settings that these frames do not follow yet.
        wrote = not wire.is_paused and fast_path.write(transport)
        try:
            if wrote or wire.ending or wire.waiting or not fast_path.is_open or http2.want_write or http2.queued_body_size():
                self._write_http2(transport, wrote=wrote)
            else:  # libnghttp2 has nothing to send
                fast_path.resume()
            is_over = not (http2.want_read or http2.want_write or fast_path.has_unsent)
        except NGH2Error:
            self._give_up()
            return
        self._look_at_rest(transport, is_over=is_over)

    def _write_http2(self, transport: asyncio.Transport, *, wrote: bool) -> None:
        """Write what libnghttp2 has to send; `wrote`: some of it has been written already.

        Raises:
            NGH2Error: the connection cannot go on.
        """
        wire = self._wire
        wrote |= wire.write(transport)
        if self._fast_path.relieve(paused=wire.is_paused):
            wrote |= wire.write(transport)
        if wrote:  # streams close when their last frame has left
            self.session.take_events()

    def _look_at_rest(self, transport: asyncio.Transport, *, is_over: bool) -> None:
        """Count unsent bytes and calls in flight, and close the connection if it is over."""
        wire = self._wire
        if wire.is_paused or wire.unsent or not self._fast_path.is_open:
            wire.count(transport, self.loop.time())
        if self.session.count_calls():
            self._shed_calls()
        if is_over:
            self._leave(transport)
        elif self.goes:
            self._server.sent(self)

    def ping(self) -> None:
        self.session.pinged_s = self.loop.time()
        with contextlib.suppress(NGH2Error):
            self._http2.ping()
        self.flush()

    def give_notice(self) -> None:
        """Ask the client to send further calls elsewhere; calls on their way are still served.

        Proxies do not retry calls that arrive after `go_away`, as they cannot know whether these were processed.
        """
        if not (self._has_notice or self._is_ending):
            self._has_notice = True
            with contextlib.suppress(NGH2Error):
                self._http2.send_shutdown_notice()
                self._http2.ping(NOTICE)
            self.flush()

    def go_away(self, code: int = NO_ERROR) -> None:
        """Refuse new calls, with GOAWAY and an HTTP/2 error code."""
        if not self._is_ending:
            self.goes = True
            self._fast_path.retire()
            self.flush()
            with contextlib.suppress(NGH2Error):  # it is at its end already
                self._http2.send_goaway(code)
            self.flush()

    def give_up_unread(self, now_s: float) -> None:
        """End the connection if its client has not read its responses for `stall_s`."""
        wire = self._wire
        if wire.transport is not None and wire.unsent:
            wire.count(wire.transport, now_s)
            if wire.is_unread_since(now_s - self._limits.stall_s):
                self._end_unread(wire.transport)

    def close(self) -> None:
        """End the connection once written responses have left."""
        self.flush()
        if self._wire.transport is not None:
            self._leave(self._wire.transport)

    def abort(self) -> None:
        if self._wire.transport is not None:
            self._wire.transport.abort()

    @property
    def _is_ending(self) -> bool:
        return self.goes or self.session.has_ended or self._wire.transport is None

    def _shed_calls(self) -> None:
        """Give up the latest calls, or the connection if its client does not read its responses."""
        patience_s, transport = self._share.patience_s(self._limits.short_stall_s), self._wire.transport
        if transport is not None and self._wire.is_unread_since(self.loop.time() - patience_s):
            self._end_unread(transport)
        else:
            self.session.shed_calls()

    def _resume_oldest(self) -> None:
        self.session.resume_oldest()

    def _end_unread(self, transport: asyncio.Transport) -> None:
        """End the connection without its unread responses, and free their memory at once."""
        self._server.unread(self._wire.unsent)
        self._reader = DiscardingReader()
        with contextlib.suppress(NGH2Error):
            self._http2.terminate_connection(ENHANCE_YOUR_CALM)
            self._wire.write(transport)
        self.session.end_all()
        self.loop.call_soon(transport.abort)  # after that write

    def _pace(self, *, has_more: bool) -> None:
        """Leave received bytes for another loop iteration and stop reading the socket meanwhile."""
        transport, had_more = self._wire.transport, self._has_more
        if transport is None:
            return
        self._has_more = has_more
        if has_more:
            if not had_more:
                transport.pause_reading()
            self._scheduler.wait(self)
        else:
            transport.resume_reading()

    def _broken(self, error: NGH2Error) -> None:
        self._server.broken(error)
        transport = self._wire.transport
        # libnghttp2 sends no GOAWAY then. With a full socket the client is inside a frame, and none can be sent.
        if isinstance(error, DenialOfServiceError) and transport is not None and not self._wire.is_paused:
            transport.write(goaway(self._fast_path.latest, ENHANCE_YOUR_CALM))
        self._give_up()

    def _give_up(self) -> None:
        """Send libnghttp2's reason, if possible, and close."""
        transport = self._wire.transport
        if transport is not None and not self._wire.has_left:
            with contextlib.suppress(NGH2Error):
                self._wire.write(transport)
            self.goes = True  # libnghttp2 or `_broken` said GOAWAY
            self._leave(transport)
            self.loop.call_later(LAST_WORD_S, transport.abort)  # nothing more comes of it, whatever the client does

    def _leave(self, transport: asyncio.Transport) -> None:
        """End the server's side and its calls, and drop further input: the socket may stay open for a while."""
        had_left = self._wire.has_left
        self._wire.leave(transport, has_said_so=self.goes)
        if not had_left:
            self.goes = True
            self._reader = DiscardingReader()
            self.session.pinged_s = self.loop.time()  # the client has keepalive_timeout_s to close
            self.session.end_all()
