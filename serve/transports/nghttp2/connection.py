"""An HTTP/2 session on its socket: what has come is read at once, what there is to send is written at the end of a turn of the
loop, so that all answers of a batch leave in one write. Nothing here waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol, cast

from ngh2.exceptions import ConnectionStateError, DenialOfServiceError, NGH2Error

from serve.security.memory_budget import MemoryBudget
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.bounds import most_header_bytes
from serve.transports.nghttp2.frame_reader import FrameReader, NoReader
from serve.transports.nghttp2.frames import ENHANCE_YOUR_CALM, NO_ERROR, goaway
from serve.transports.nghttp2.outlet import WRITE_BYTES
from serve.transports.nghttp2.reading_turns import SMALL_BYTES, ReadingTurns
from serve.transports.nghttp2.session import FREE_CALLS, NOTICE, GrpcSession, Route


class Owner(Protocol):
    """What a connection asks of its server."""

    @property
    def received(self) -> bytearray:
        """Memory for what a socket has to say."""

    def connected(self, connection: GrpcConnection) -> None:
        """Take note of a new connection."""

    def disconnected(self, connection: GrpcConnection) -> None:
        """Forget it."""

    def unread(self, size: int) -> None:
        """Take note of a connection that ends with `size` bytes of answers which its client has not read."""

    def broken(self, error: NGH2Error) -> None:
        """Take note that a client has broken HTTP/2."""

    @property
    def budget(self) -> MemoryBudget:
        """The memory that all connections may take."""

    @property
    def reading_turns(self) -> ReadingTurns:
        """When to read what has come."""

    def flush_soon(self, connection: GrpcConnection) -> None:
        """Have `connection.flush` called at the end of this turn of the loop."""

    def sent(self, connection: GrpcConnection) -> None:
        """A connection that takes no new calls may have less to send."""


class GrpcConnection(GrpcSession, asyncio.BufferedProtocol):
    """The server's side of one client connection: its session, and the socket.

    Attributes:
        opened_s: when it began, on the loop's clock.
    """

    def __init__(self, owner: Owner, route: Route, limits: TransportLimits) -> None:
        super().__init__(route, limits, owner.budget)
        self._owner, self._turns = owner, owner.reading_turns
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._reader: FrameReader | NoReader = FrameReader(self._repeated, most_header_bytes(limits))
        self._receiving = self._has_more = self._has_notice = self._goes = self._has_left = False
        self._loop = asyncio.get_running_loop()  # which asks the kernel who it is each time that somebody looks for it
        self.opened_s = self.heard_s = self._loop.time()

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
        """Whether its client has answers still to read."""
        if self._transport is None:
            return False
        if self._has_left:
            return self._transport.get_write_buffer_size() > 0
        return self._outlet.paused or self._http2.queued_body_size() > 0

    @property
    def goes(self) -> bool:
        """Whether it takes no new calls."""
        return self._goes

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast("asyncio.Transport", transport)
        self._owner.connected(self)
        self.greet()
        self.flush()

    def get_buffer(self, sizehint: int) -> bytearray | memoryview:  # noqa: ARG002  (the signature is asyncio's)
        """Where the socket's bytes go. They are looked at before any other socket is, so all connections share it."""
        received = self._owner.received
        # One more than is small: a full buffer has more behind it, and uvloop would fill it 32 times in a row.
        return memoryview(received)[: SMALL_BYTES + 1] if self._turns.is_crowded else received

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self.data_received(memoryview(self._owner.received)[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Take bytes, hand them to their calls, answer what can be answered at once."""
        self.heard_s = self._loop.time()
        if self._turns.must_wait(len(data)):
            self._reader.keep(data)
            self._pace(has_more=True)
            return
        self._receiving = True
        try:
            has_more = self._reader.read(data, self)
        except NGH2Error as error:
            if not (self._goes and isinstance(error, ConnectionStateError) and self._is_at_its_end()):
                self._broken(error)
                return
            has_more = False  # its end was among these bytes: nobody needs the others
        finally:
            self._receiving = False
        if has_more or self._has_more:
            self._pace(has_more=has_more)
        self.flush()

    def read_on(self) -> None:
        """Read more of what has come, where some was left for another turn."""
        if self._has_more and self._transport is not None:
            self.data_received(b"")

    def eof_received(self) -> bool:
        """The client will send nothing more, answers included that it would read: gRPC clients do not half-close."""
        return False

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002  (the signature is asyncio's)
        """Every call in flight is without a client now."""
        self._transport = None
        self._owner.disconnected(self)
        self._end_all()

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        self._outlet.paused = True
        self._repeated.is_open = False

    def resume_writing(self) -> None:
        """The socket takes more."""
        if not self._has_left:
            self._outlet.paused = False
            self.flush()

    # The server's side

    def flush(self) -> None:
        """Write what there is to send, as far as the socket takes it."""
        transport = self._transport
        if transport is None or self._has_left:
            return
        repeated, outlet = self._repeated, self._outlet
        while repeated.closed:
            self._stream_gone(repeated.closed.pop())
        explains = bool(repeated.explained) and not outlet.paused and self._explain()
        if not outlet.paused:
            repeated.acknowledge()
            # First: what libnghttp2 sends may be that it takes the client's new settings, which these were not made for.
            if repeated.unsent:
                unsent = b"".join(repeated.unsent)
                repeated.unsent.clear()
                transport.write(unsent)
        try:
            wrote = outlet.write(transport) or explains
            if repeated.relieve(paused=outlet.paused):
                wrote |= outlet.write(transport)
            if wrote:  # libnghttp2 is done with a stream when the last of it has left
                self._take_events()
            is_over = not (self._http2.want_read or self._http2.want_write or repeated.unsent)
        except NGH2Error:
            self._give_up()
            return
        self._look_at_rest(transport, is_over=is_over)

    def _look_at_rest(self, transport: asyncio.Transport, *, is_over: bool) -> None:
        """Count what has not left and the calls in flight, and leave if the connection is over."""
        outlet = self._outlet
        if outlet.paused or outlet.unsent or not self._repeated.is_open:
            outlet.count(transport.get_write_buffer_size() if outlet.paused else 0, self._loop.time())
        if len(self._calls) >= FREE_CALLS or self._counted_calls:
            self._count_calls()
        if is_over:
            self._leave(transport)
        elif self._goes:
            self._owner.sent(self)

    def ping(self) -> None:
        """Ask whether the other side still lives; one that cannot be asked any more does not answer either."""
        self.pinged_s = self._loop.time()
        with contextlib.suppress(NGH2Error):
            self._http2.ping()
        self.flush()

    def give_notice(self) -> None:
        """Have the client take its next calls elsewhere; those that are on their way are still served.

        A proxy does not try a call anew that came behind `go_away`, as it cannot know what has become of it.
        """
        if not (self._has_notice or self._closing) and self._transport is not None:
            self._has_notice = True
            with contextlib.suppress(NGH2Error):
                self._http2.send_shutdown_notice()
                self._http2.ping(NOTICE)
            self.flush()

    def go_away(self, code: int = NO_ERROR) -> None:
        """Take no new calls, and say so, with HTTP/2's `code`."""
        if not self._closing and self._transport is not None:
            self._closing = self._goes = True
            self._repeated.retire()
            self.flush()
            with contextlib.suppress(NGH2Error):  # it is at its end already
                self._http2.send_goaway(code)
            self.flush()

    def give_up_unread(self, now_s: float) -> None:
        """End the connection if its client has not read its answers for `stall_s`."""
        transport = self._transport
        if transport is not None and self._outlet.unsent:
            self._outlet.count(transport.get_write_buffer_size() if self._outlet.paused else 0, now_s)
            if self._outlet.is_unread_since(now_s - self.limits.stall_s):
                self._end_unread(transport)

    def close(self) -> None:
        """End the connection once what was answered is out."""
        if self._transport is not None:
            self.flush()
            if self._transport is not None:
                self._leave(self._transport)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _press(self) -> None:
        """Give up the latest calls, or the connection where its client does not read its answers."""
        patience_s = self.share.patience_s(self.limits.short_stall_s)
        if self._transport is not None and self._outlet.is_unread_since(self._loop.time() - patience_s):
            self._end_unread(self._transport)
        else:
            super()._press()

    def _end_unread(self, transport: asyncio.Transport) -> None:
        """End the connection without what its client does not read, and free that at once."""
        self._owner.unread(self._outlet.unsent)
        self._reader = NoReader()
        with contextlib.suppress(NGH2Error):
            self._http2.terminate_connection(ENHANCE_YOUR_CALM)
            self._outlet.write(transport)
        self._end_all()
        self._loop.call_soon(transport.abort)  # once that is written, if the socket takes it

    def _pace(self, *, has_more: bool) -> None:
        """Leave what has come for another turn, and the socket with it, so that batches and other connections get theirs."""
        transport, had_more = self._transport, self._has_more
        if transport is None:
            return
        self._has_more = has_more
        if has_more:
            if not had_more:
                transport.pause_reading()
            self._turns.wait(self)
        else:
            transport.resume_reading()

    def _notice_read(self) -> None:
        self._loop.call_soon(self.go_away)  # not amid what has come

    def _flush_soon(self) -> None:
        if not self._receiving:
            self._owner.flush_soon(self)

    def _explain(self) -> bool:
        """Answer the calls that libnghttp2 resets, before it does so; True, as it has written something.

        Only when it has written the resets does it tell whether it ends the connection in their place: where headers cannot be
        decompressed.
        """
        repeated, frames = self._repeated, b""
        with contextlib.suppress(NGH2Error):
            frames = self._http2.data_to_send(WRITE_BYTES)
        if self._is_at_its_end():
            frames = repeated.last_words(frames)
        else:
            repeated.unsent += repeated.explained
        repeated.explained.clear()
        repeated.unsent.append(frames)
        return True

    def _is_at_its_end(self) -> bool:
        """Whether nothing that comes is read any more."""
        try:
            return not self._http2.want_read
        except NGH2Error:
            return True

    def _too_much(self) -> None:
        self._loop.call_soon(self.go_away, ENHANCE_YOUR_CALM)  # not amid what has come

    def _broken(self, error: NGH2Error) -> None:
        self._owner.broken(error)
        # libnghttp2 says nothing then. Where the socket is full, the client is in the middle of a frame.
        if isinstance(error, DenialOfServiceError) and self._transport is not None and not self._outlet.paused:
            self._transport.write(goaway(self._repeated.latest, ENHANCE_YOUR_CALM))
        self._give_up()

    def _leave(self, transport: asyncio.Transport) -> None:
        """Close once what was written is out: where the client was told to go, when it has read that.

        It may still say that it has read some. For a socket that is closed already the system would answer with a reset, and
        take away what of the answers has arrived and is not read yet.
        """
        if not self._goes or not transport.can_write_eof():  # TLS waits for the client's word by itself
            transport.close()
        elif not self._has_left:
            transport.write_eof()
        self._write_no_more()

    def _give_up(self) -> None:
        """Say why, if that is still possible, and close."""
        if self._transport is not None and not self._has_left:
            with contextlib.suppress(NGH2Error):
                self._outlet.write(self._transport)
            self._transport.close()
            self._write_no_more()

    def _write_no_more(self) -> None:
        """End the calls, and read no more: the socket may stay open for a while, and libnghttp2 takes nothing any more."""
        if not self._has_left:
            self._closing = self._goes = self._has_left = self._outlet.paused = True
            self._reader = NoReader()
            self.pinged_s = self._loop.time()  # it has as long to close as for the answer to a ping
            self._end_all()
