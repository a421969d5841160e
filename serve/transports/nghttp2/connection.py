"""An HTTP/2 session on its socket.

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
from halfserve.serve.transports.nghttp2.flow_control import WRITE_BYTES
from halfserve.serve.transports.nghttp2.frame_reader import DiscardingReader, FrameReader
from halfserve.serve.transports.nghttp2.frames import ENHANCE_YOUR_CALM, NO_ERROR, goaway
from halfserve.serve.transports.nghttp2.session import FREE_CALLS, NOTICE, GrpcSession, Route
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


class GrpcConnection(GrpcSession):
    """The server's side of one client connection: its session and its socket."""

    def __init__(self, owner: ConnectionServer, route: Route, limits: TransportLimits) -> None:
        super().__init__(route, limits, owner.budget)
        self._owner, self._scheduler = owner, owner.read_scheduler
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._reader: FrameReader | DiscardingReader = FrameReader(self._fast_path, most_header_bytes(limits))
        self.unflushed = 0  # responses since the latest flush
        self._receiving = self._has_more = self._has_notice = self._goes = self._has_left = False
        self.loop = asyncio.get_running_loop()  # kept: get_running_loop() makes a system call
        self.opened_s = self.heard_s = self.loop.time()  # on the loop's clock

    @property
    def peer(self) -> str:
        """The client's address."""
        if not self._peer and self._transport is not None:
            name = self._transport.get_extra_info("peername")
            host, port = name[:2] if isinstance(name, tuple) else ("unix", 0)
            self._peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self._peer

    @property
    def has_unsent(self) -> bool:
        """Whether responses have not left yet."""
        if self._transport is None:
            return False
        if self._has_left:
            return self._transport.get_write_buffer_size() > 0
        return self._send_buffer.paused or self._http2.queued_body_size() > 0

    @property
    def goes(self) -> bool:
        """Whether it takes no new calls."""
        return self._goes

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._owner.connected(self)
        self.greet()
        self.flush()

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:  # noqa: ARG002  (the signature is asyncio's)
        """Return the buffer to read the socket into; its bytes are used before any other socket is read."""
        received = self._owner.received
        if not self._scheduler.has_begun_turn:
            return received
        size = self._scheduler.receive_bytes(self, len(received))
        return received if size == len(received) else memoryview(received)[:size]

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(memoryview(self._owner.received)[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Read bytes, hand them to their calls, and write immediate responses."""
        self.heard_s = self.loop.time()
        if len(data) > SMALL_BYTES and self._scheduler.must_wait(self, len(data)):
            self._reader.keep(data)
            self._pace(has_more=True)
            return
        self._receiving, self._has_fed = True, False
        try:
            has_more = self._reader.read(data, self)
        except NGH2Error as error:
            if not (self._goes and isinstance(error, ConnectionStateError) and self._is_at_its_end()):
                self._broken(error)
                return
            has_more = False  # the connection ended within these bytes
        finally:
            self._receiving = False
        if has_more or self._has_more:
            self._pace(has_more=has_more)
        has_many = len(self._calls) >= FREE_CALLS
        if self._has_fed or self.unflushed or self._goes or has_many or self._fast_path.has_news:
            self.flush()

    def read_on(self) -> None:
        """Read more of the bytes left for another loop iteration."""
        if self._has_more and self._transport is not None:
            self.data_received(b"")

    def eof_received(self) -> bool:
        """Close: gRPC clients do not half-close connections."""
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  (the signature is asyncio's)
        self._transport = None
        self._owner.disconnected(self)
        self._end_all()

    def pause_writing(self) -> None:
        self._send_buffer.paused = True
        self._fast_path.pause()

    def resume_writing(self) -> None:
        if not self._has_left:
            self._send_buffer.paused = False
            self.flush()

    # The server's side

    def flush(self) -> None:
        """Write pending data, as far as the socket takes it."""
        self.unflushed = 0
        transport = self._transport
        if transport is None or self._has_left:
            return
        repeated, send_buffer, http2 = self._fast_path, self._send_buffer, self._http2
        while repeated.closed:
            self._stream_gone(repeated.closed.pop())
        explains = repeated.has_explained and not send_buffer.paused and self._explain()
        if not send_buffer.paused:
            repeated.write(transport)  # first: libnghttp2 may acknowledge new settings that these frames do not follow yet
        try:
            listens = send_buffer.ending or send_buffer.waiting
            if explains or listens or not repeated.is_open or http2.want_write or http2.queued_body_size():
                self._write_http2(transport, explains=explains)
            else:  # libnghttp2 has nothing to send
                repeated.resume()
            is_over = not (http2.want_read or http2.want_write or repeated.has_unsent)
        except NGH2Error:
            self._give_up()
            return
        self._look_at_rest(transport, is_over=is_over)

    def _write_http2(self, transport: asyncio.Transport, *, explains: bool) -> None:
        """Write what libnghttp2 has to send; `explains`: some of it has been written already.

        Raises:
            NGH2Error: the connection cannot go on.
        """
        send_buffer = self._send_buffer
        wrote = send_buffer.write(transport) or explains
        if self._fast_path.relieve(paused=send_buffer.paused):
            wrote |= send_buffer.write(transport)
        if wrote:  # streams close when their last frame has left
            self._take_events()

    def _look_at_rest(self, transport: asyncio.Transport, *, is_over: bool) -> None:
        """Count unsent bytes and calls in flight, and close the connection if it is over."""
        send_buffer = self._send_buffer
        if send_buffer.paused or send_buffer.unsent or not self._fast_path.is_open:
            send_buffer.count(transport.get_write_buffer_size() if send_buffer.paused else 0, self.loop.time())
        if len(self._calls) >= FREE_CALLS or self._counted_calls:
            self._count_calls()
        if is_over:
            self._leave(transport)
        elif self._goes:
            self._owner.sent(self)

    def ping(self) -> None:
        self.pinged_s = self.loop.time()
        with contextlib.suppress(NGH2Error):
            self._http2.ping()
        self.flush()

    def give_notice(self) -> None:
        """Ask the client to send further calls elsewhere; calls on their way are still served.

        Proxies do not retry calls that arrive after `go_away`, as they cannot know whether these were processed.
        """
        if not (self._has_notice or self._closing) and self._transport is not None:
            self._has_notice = True
            with contextlib.suppress(NGH2Error):
                self._http2.send_shutdown_notice()
                self._http2.ping(NOTICE)
            self.flush()

    def go_away(self, code: int = NO_ERROR) -> None:
        """Refuse new calls, with GOAWAY and an HTTP/2 error code."""
        if not self._closing and self._transport is not None:
            self._closing = self._goes = True
            self._fast_path.retire()
            self.flush()
            with contextlib.suppress(NGH2Error):  # it is at its end already
                self._http2.send_goaway(code)
            self.flush()

    def give_up_unread(self, now_s: float) -> None:
        """End the connection if its client has not read its responses for `stall_s`."""
        transport = self._transport
        if transport is not None and self._send_buffer.unsent:
            self._send_buffer.count(transport.get_write_buffer_size() if self._send_buffer.paused else 0, now_s)
            if self._send_buffer.is_unread_since(now_s - self.limits.stall_s):
                self._end_unread(transport)

    def close(self) -> None:
        """End the connection once written responses have left."""
        if self._transport is not None:
            self.flush()
            if self._transport is not None:
                self._leave(self._transport)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _shed_calls(self) -> None:
        """Give up the latest calls, or the connection if its client does not read its responses."""
        patience_s = self.share.patience_s(self.limits.short_stall_s)
        if self._transport is not None and self._send_buffer.is_unread_since(self.loop.time() - patience_s):
            self._end_unread(self._transport)
        else:
            super()._shed_calls()

    def _end_unread(self, transport: asyncio.Transport) -> None:
        """End the connection without its unread responses, and free their memory at once."""
        self._owner.unread(self._send_buffer.unsent)
        self._reader = DiscardingReader()
        with contextlib.suppress(NGH2Error):
            self._http2.terminate_connection(ENHANCE_YOUR_CALM)
            self._send_buffer.write(transport)
        self._end_all()
        self.loop.call_soon(transport.abort)  # after that write

    def _pace(self, *, has_more: bool) -> None:
        """Leave received bytes for another loop iteration and stop reading the socket meanwhile."""
        transport, had_more = self._transport, self._has_more
        if transport is None:
            return
        self._has_more = has_more
        if has_more:
            if not had_more:
                transport.pause_reading()
            self._scheduler.wait(self)
        else:
            transport.resume_reading()

    def _notice_read(self) -> None:
        self.loop.call_soon(self.go_away)  # not while reading

    def _flush_soon(self, *, is_last: bool = False) -> None:
        self.unflushed += 1
        if self.unflushed == 1 and not self._receiving:
            if is_last:
                self._owner.flush_last(self)
            else:
                self._owner.flush_soon(self)

    def _explain(self) -> bool:
        """Answer the calls that libnghttp2 is about to reset; True, as it has written.

        Only after writing the resets does libnghttp2 show whether it ends the connection instead, as for undecodable headers.
        """
        resets = b""
        with contextlib.suppress(NGH2Error):
            resets = self._http2.data_to_send(WRITE_BYTES)
        self._fast_path.explain_resets(resets, is_last=self._is_at_its_end())
        return True

    def _is_at_its_end(self) -> bool:
        """Return whether libnghttp2 reads no more."""
        try:
            return not self._http2.want_read
        except NGH2Error:
            return True

    def _too_much(self) -> None:
        self.loop.call_soon(self.go_away, ENHANCE_YOUR_CALM)  # not while reading

    def _broken(self, error: NGH2Error) -> None:
        self._owner.broken(error)
        # libnghttp2 sends no GOAWAY then. With a full socket the client is inside a frame, and none can be sent.
        if isinstance(error, DenialOfServiceError) and self._transport is not None and not self._send_buffer.paused:
            self._transport.write(goaway(self._fast_path.latest, ENHANCE_YOUR_CALM))
        self._give_up()

    def _leave(self, transport: asyncio.Transport) -> None:
        """Close after the written data; after GOAWAY, when the client has read it.

        A socket closed while the client still sends would answer with RST, and destroy responses that the client has not read.
        """
        if not self._goes or not transport.can_write_eof():  # TLS itself waits for the client's close
            transport.close()
        elif not self._has_left:
            transport.write_eof()
        self._write_no_more()

    def _give_up(self) -> None:
        """Send libnghttp2's reason, if possible, and close."""
        if self._transport is not None and not self._has_left:
            with contextlib.suppress(NGH2Error):
                self._send_buffer.write(self._transport)
            self._goes = True  # libnghttp2 or `_broken` said GOAWAY
            transport = self._transport
            self._leave(transport)
            self.loop.call_later(LAST_WORD_S, transport.abort)  # nothing more comes of it, whatever the client does

    def _write_no_more(self) -> None:
        """End the calls and drop further input: the socket may stay open for a while."""
        if not self._has_left:
            self._closing = self._goes = self._has_left = self._send_buffer.paused = True
            self._reader = DiscardingReader()
            self.pinged_s = self.loop.time()  # the client has keepalive_timeout_s to close
            self._end_all()
