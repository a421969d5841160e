"""The answers of one connection: writing them in pieces, and the time in which the client must read them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from halfserve.serve.http.http_options import MOMENT_S, HttpLimits
from halfserve.serve.security.client_limits import network_of
from halfserve.serve.security.memory_budget import MemoryShare
from halfserve.serve.transports.task_turns import TaskTurns

LARGE_BYTES = 16_384  # smaller buffers are not counted
PIECE_BYTES = 2**20  # of an answer, written at once: a socket takes a megabyte in 0.3 ms


def _nothing() -> None:
    """Do nothing: the callback of a closed connection."""


class TimeLimit:
    """Calls a function after a time, and after a moment in which bytes that have arrived are read (see `MOMENT_S`)."""

    __slots__ = ("_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self, seconds: float, then: Callable[[], None]) -> None:
        """Start the time; an earlier one is cancelled."""
        self.cancel()
        self._timer = self._loop.call_later(seconds, self._wait_a_moment, then)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_a_moment(self, then: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(MOMENT_S, self._end, then)

    def _end(self, then: Callable[[], None]) -> None:
        self._timer = None
        then()


class AnswerWriter:
    """Gives large answers to the socket in pieces, in turns with other clients' steps.

    Aborts a client that reads nothing for `stall_s`, or too slowly while memory is short.

    Attributes:
        unread_bytes: bytes of answers that the socket has not taken.
        is_paused: whether the application must wait before it writes more.
    """

    def __init__(
        self, transport: asyncio.Transport, limits: HttpLimits, share: MemoryShare, turns: TaskTurns, count: Callable[[], None]
    ) -> None:
        """Make the writer of a new connection; `count` is called when `held_bytes` may have changed."""
        self._transport, self._limits, self._share, self._turns, self._count = transport, limits, share, turns, count
        self._loop = asyncio.get_running_loop()
        self._limit = TimeLimit(self._loop)
        self._rest: deque[memoryview] = deque()  # bytes that are still to be given to the transport
        self._rest_bytes = 0
        self._is_due = False  # whether the next piece waits for its turn
        self._closes = False  # whether to close once everything is written
        self._is_complete = False  # whether the latest answer is written to its end
        self._large_bytes = 0  # size of a large answer that is not read to its end: the transport keeps it whole
        self._seen_bytes, self._since_s = 0, 0.0  # unread bytes at the latest look, and its time
        self._room = asyncio.Event()  # set while the application may write
        self._room.set()

    @property
    def unread_bytes(self) -> int:
        return int(self._transport.get_write_buffer_size()) + self._rest_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that unread answers hold; small ones are not counted."""
        return max(self.unread_bytes, self._large_bytes) if self.is_paused else 0

    @property
    def is_paused(self) -> bool:
        return not self._room.is_set()

    @property
    def is_closing(self) -> bool:
        return self._closes or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not data or self.is_closing:
            return
        self._is_complete = False
        if len(data) > LARGE_BYTES:
            self._transport.set_write_buffer_limits(0)  # writing is paused until the client has read everything
            self._large_bytes = len(data)
        if not self._rest and len(data) <= PIECE_BYTES:
            self._transport.write(data)
            return
        begins = not self._rest
        self._rest.append(memoryview(data))
        self._rest_bytes += len(data)
        if begins:
            self.pause()
            self._write_piece()

    def complete(self) -> None:
        """Start the time limit of reading an answer that is written to its end."""
        self._is_complete = True
        self._expect_reading()

    def pause(self) -> None:
        """Let the application wait, and start the time limit of reading what is written so far."""
        self._room.clear()
        self._expect_reading()

    def resume(self) -> None:
        """Write on, or let the application write on, because the transport has written what it kept."""
        if self._rest:
            self._write_later()
            return
        self._room.set()
        self._let_go()
        self._count()
        if not self._is_complete:
            self._limit.cancel()

    async def drain(self) -> None:
        """Wait until the application may write on, or the connection is lost."""
        await self._room.wait()

    def wait_for_all(self) -> None:
        """Make `drain` wait until the client has read everything, or the connection is lost."""
        self._transport.set_write_buffer_limits(0)

    def press(self) -> None:
        """Abort a client that reads too slowly while memory is short."""
        unread = self.unread_bytes
        if unread < self._seen_bytes:
            self._has_read(unread)
        elif unread and self._loop.time() - self._since_s > self._share.patience_s(self._limits.short_stall_s):
            self._share.close()
            self._transport.abort()

    def flush(self) -> None:
        """Give the transport all the rest at once, because it closes after what it has."""
        while self._rest:
            self._transport.write(self._rest.popleft())
        self._rest_bytes = 0

    def write_eof(self) -> None:
        """Close this side of the connection, where the transport can, once everything is written."""
        if self._transport.can_write_eof():
            self.flush()
            self._transport.write_eof()

    def close(self) -> None:
        """Close the connection once everything is written."""
        if self._rest:
            self._closes = True
            self._transport.pause_reading()
        else:
            self._transport.close()

    def lose(self) -> None:
        """Forget the rest, because the connection is lost."""
        self._rest.clear()
        self._rest_bytes = 0
        self._limit.cancel()
        self._count = _nothing  # breaks the reference cycle through the callback
        self._room.set()

    def _write_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            peer = self._transport.get_extra_info("peername")
            client = network_of(f"{peer[0]}:{peer[1]}") if isinstance(peer, tuple) else ""
            self._turns.call_later(client, self._write_piece)

    def _write_piece(self) -> None:
        self._is_due = False
        if not self._rest or self._transport.is_closing():
            return
        whole = self._rest.popleft()
        piece = whole[:PIECE_BYTES]
        if len(piece) < len(whole):
            self._rest.appendleft(whole[PIECE_BYTES:])
        self._rest_bytes -= len(piece)
        self._transport.write(piece)
        is_taken = not self._transport.get_write_buffer_size()  # else the transport says when it has written the piece
        if self._closes and not self._rest:
            self._transport.close()
        elif is_taken:
            self.resume()

    def _expect_reading(self) -> None:
        self._seen_bytes = self.unread_bytes
        if not self._seen_bytes:
            self._let_go()
        self._count()
        if self._seen_bytes and not self._limit.is_running:
            self._await_reading()

    def _let_go(self) -> None:
        """Take note that a large answer has been read."""
        if self._large_bytes:
            self._large_bytes = 0
            # Over TLS, uvloop has no protocol to tell from the loss of a connection until `connection_lost` is called.
            if not self._transport.is_closing():
                self._transport.set_write_buffer_limits()

    def _await_reading(self) -> None:
        self._since_s = self._loop.time()
        self._limit.start(self._limits.stall_s, self._check)

    def _check(self) -> None:
        """Abort if nothing of the answer was read since the last check."""
        unread = self.unread_bytes
        if not unread:
            return
        if unread >= self._seen_bytes:
            self._transport.abort()
            return
        self._has_read(unread)
        self._await_reading()

    def _has_read(self, unread: int) -> None:
        self._seen_bytes, self._since_s = unread, self._loop.time()
        self._count()
