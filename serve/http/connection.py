"""One HTTP/1.1 connection: uvicorn's, with bounds on how long a client may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from serve.http.event_turns import EventTurns, HeldFlow
from serve.http.options import MOMENT_S, HttpLimits, memory_of
from serve.security.memory_budget import MemoryBudget

LARGE_BYTES = 16_384  # what is less is not worth counting


class HttpConnection(H11Protocol):
    """Closes on clients that open and say nothing, that dribble headers, or that never read their answer.

    Where one is refused while it sends a body, this side alone is closed, and what still comes is dropped for `stall_s`: for a
    socket that is closed the system would answer with a reset, and many clients that meet one do not look at their answer.
    """

    conn: EventTurns
    flow: HeldFlow

    def __init__(self, config: Config, state: ServerState, limits: HttpLimits, budget: MemoryBudget) -> None:
        super().__init__(config, state, {})
        self.conn = EventTurns(h11.SERVER, limits.max_header_bytes)
        self._limits = limits
        self._next_turn: asyncio.Handle | None = None
        self._overdue: asyncio.TimerHandle | None = None  # the rest of a request's headers
        self._unread: asyncio.TimerHandle | None = None  # the rest of an answer
        self._unread_bytes, self._unread_since_s = 0, 0.0
        self._share = budget.share(is_known=True, press=self._press)
        self._leaving: asyncio.TimerHandle | None = None  # the client's end
        self._drops = False  # what still comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)  # type: ignore[arg-type]  # (uvicorn asks for asyncio.Transport, which this is)
        self.flow = HeldFlow(self.transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._share.close()
        self._stop_waiting()
        for timer in (self._unread, self._leaving, self._next_turn):
            if timer is not None:
                timer.cancel()
        if self.cycle is not None:
            self.cycle.transport = self.transport  # instead of what leads back here
        super().connection_lost(exc)

    @property
    def window_bytes(self) -> int:
        """How many bytes there is room for at once, if all connections bring as many."""
        return self._share.window_bytes

    def data_received(self, data: bytes | memoryview) -> None:
        """Take bytes, as long as they are wanted."""
        if not self._drops:
            super().data_received(data)  # type: ignore[arg-type]  # (uvicorn hands them to h11, which takes both)
        self._count()

    def handle_events(self) -> None:
        """Act on what has arrived, and wait for the rest of headers that have begun to, or of a request that is answered."""
        self.conn.begin_turn()
        super().handle_events()
        if self.conn.has_more and self._next_turn is None and not self.transport.is_closing():
            self.flow.hold()
            self._next_turn = self.loop.call_soon(self._take_turn)
        if self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.transport is self.transport:
            self.cycle.transport = cast("asyncio.Transport", _Answering(self))
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun:
            self._stop_waiting()
        elif self._overdue is None:
            self._await_headers()
        if not begun and self._is_answered() and self.timeout_keep_alive_task is None:
            # uvicorn, which has stopped it, starts it with an answer alone: there may be more of the request after that.
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _take_turn(self) -> None:
        self._next_turn = None
        if not self._drops:
            self.handle_events()
        if self._next_turn is None and not self.transport.is_closing():
            self.flow.release()

    def on_response_complete(self) -> None:
        """See that the client takes its answer."""
        super().on_response_complete()
        self._unread_bytes = self._write_buffer()
        self._count()
        if self._unread_bytes and self._unread is None:
            self._await_reading()

    def resume_writing(self) -> None:
        """The client has read almost all."""
        super().resume_writing()
        self._count()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that nothing more has come from."""
        self.timeout_keep_alive_task = self.loop.call_later(MOMENT_S, super().timeout_keep_alive_handler)

    def leave(self) -> None:
        """Close once the client has closed, if it is still sending."""
        if self.conn.their_state is not h11.SEND_BODY:
            self.transport.close()
            return
        if self._leaving is None:
            self._drops = True
            self._leaving = self.loop.call_later(self._limits.stall_s, self.transport.close)
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def tell_when_read(self) -> None:
        """Have `flow.drain` wait until the client has taken all that was written, or has gone."""
        self.transport.set_write_buffer_limits(0)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  (uvicorn hands its own text over)
        """Answer what is no HTTP in the form of all other errors, unless it follows the connection's last request."""
        if self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete):
            self._drops, self.cycle.keep_alive = True, False
            return
        body = b'{"error":"the request is not HTTP/1.1 as this server reads it; check its line, headers and lengths"}'
        headers: list[Any] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._drops = True
        self.transport.close()

    def _is_answered(self) -> bool:
        """Whether nothing is owed to the client."""
        return self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing()

    def _await_headers(self) -> None:
        self._overdue = self.loop.call_later(self._limits.header_s, self._abort_soon)

    def _abort_soon(self) -> None:
        self._overdue = self.loop.call_later(MOMENT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _await_reading(self) -> None:
        self._unread_since_s = self.loop.time()
        self._unread = self.loop.call_later(self._limits.stall_s, self._check_unread_soon)

    def _check_unread_soon(self) -> None:
        self._unread = self.loop.call_later(MOMENT_S, self._check_unread)

    def _check_unread(self) -> None:
        """Give up on an answer of which nothing was read since the last look."""
        self._unread = None
        left = self._write_buffer()
        if not left:
            return
        if left >= self._unread_bytes:
            self.transport.abort()
            return
        self._has_read(left)
        self._await_reading()

    def _press(self) -> None:
        """Memory is short, and this client takes more than others: end what it has sent ahead, give it less time to read."""
        left, now_s = self._write_buffer(), self.loop.time()
        if self._share.excess and self.conn.buffered_bytes > LARGE_BYTES:
            self._share.close()
            self.transport.abort()
        elif left < self._unread_bytes:
            self._has_read(left)
        elif left and now_s - self._unread_since_s > self._share.patience_s(self._limits.short_stall_s):
            self._share.close()
            self.transport.abort()

    def _has_read(self, left: int) -> None:
        self._unread_bytes, self._unread_since_s = left, self.loop.time()
        self._count()

    def _count(self) -> None:
        """Count what the client has sent ahead, and what it has not read, where that is much."""
        ahead = self.conn.buffered_bytes
        unread = self._write_buffer() if self.flow.write_paused else 0
        self._share.resize(memory_of((ahead if ahead > LARGE_BYTES else 0) + unread))

    def _write_buffer(self) -> int:
        return int(self.transport.get_write_buffer_size())


class SocketReader(asyncio.BufferedProtocol):
    """Reads a connection's socket in pieces that memory has room for.

    asyncio.Protocol is given up to 256 KiB at once, before anything can be refused: of 900 connections, 225 MiB.
    """

    def __init__(self, connection: HttpConnection, received: memoryview, left: Callable[[asyncio.BaseProtocol], None]) -> None:
        """A reader of nothing yet.

        Args:
            connection: takes what is read.
            received: where it is read to. Its bytes are taken before any other socket is read, so all readers share it.
            left: is called when the connection is lost.
        """
        self._connection, self._received, self._left = connection, received, left

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._connection.connection_lost(exc)
        self._left(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  (the signature is asyncio's)
        """Where the next bytes go."""
        return self._received[: self._connection.window_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._connection.data_received(self._received[:nbytes])

    def eof_received(self) -> None:
        """The client sends no more."""
        self._connection.eof_received()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """The client has read almost all."""
        self._connection.resume_writing()


class _Answering:
    """What uvicorn takes for the transport while it answers a request whose body is still to come."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.leave()
