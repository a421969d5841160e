"""The part of an answer that a client has not read: writing it in pieces, and the time in which the client must read on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

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


class PieceTransport(asyncio.Transport):
    """A connection's transport, which gives a large answer to the socket in pieces, in turns with other clients' steps."""

    def __init__(
        self, transport: asyncio.Transport, turns: TaskTurns, pause: Callable[[], None], resume: Callable[[], None]
    ) -> None:
        """Wrap a transport.

        Args:
            transport: transport that writes. It must pause its protocol as soon as it keeps bytes, once an answer is large.
            turns: turns of the event loop.
            pause: called when a large answer begins.
            resume: called when the socket has taken all of it.
        """
        super().__init__()
        self._transport, self._turns, self._pause, self._resume = transport, turns, pause, resume
        self._rest: deque[memoryview] = deque()  # bytes that are still to be given to the transport
        self._rest_bytes = 0
        self._is_due = False  # whether the next piece waits for its turn
        self._closes = False  # whether to close once everything is written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._rest and len(data) <= PIECE_BYTES:
            self._transport.write(data)
        elif data:
            begins = not self._rest
            self._rest.append(memoryview(data))
            self._rest_bytes += len(data)
            if begins:
                self._pause()
                self._write_piece()

    def go_on(self) -> bool:
        """Return whether there is a rest, whose next piece is written in a later turn; called when the last one is written."""
        if self._rest and not self._is_due:
            self._is_due = True
            self._turns.call_later(self._client(), self._write_piece)
        return bool(self._rest)

    def write_all(self) -> None:
        """Give the transport all the rest at once, because it closes after what it has."""
        while self._rest:
            self._transport.write(self._rest.popleft())
        self._rest_bytes = 0

    def close(self) -> None:
        if self._rest:
            self._closes = True
            self._transport.pause_reading()
        else:
            self._transport.close()

    def drop(self) -> None:
        """Forget the rest, because the connection is lost."""
        self._rest.clear()
        self._rest_bytes = 0
        self._pause = self._resume = _nothing  # breaks reference cycles through the callbacks

    def is_closing(self) -> bool:
        return self._closes or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + self._rest_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self.write_all()
        self._transport.write_eof()

    def _write_piece(self) -> None:
        self._is_due = False
        if not self._rest:
            return
        if self._transport.is_closing():
            self.drop()
            return
        whole = self._rest.popleft()
        piece = whole[:PIECE_BYTES]
        if len(piece) < len(whole):
            self._rest.appendleft(whole[PIECE_BYTES:])
        self._rest_bytes -= len(piece)
        self._transport.write(piece)
        is_taken = not self._transport.get_write_buffer_size()  # else the transport says when it has written the piece
        if self._rest:
            if is_taken:
                self.go_on()
        elif self._closes:
            self._transport.close()
        elif is_taken:
            self._resume()

    def _client(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return network_of(f"{peer[0]}:{peer[1]}") if isinstance(peer, tuple) else ""


class UnreadAnswer:
    """Watches the write buffer of one connection: aborts a client that reads nothing for `stall_s`, or too slowly."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        limits: HttpLimits,
        share: MemoryShare,
        count: Callable[[], None],
    ) -> None:
        """Watch a connection that has written nothing; `count` is called when the client has read some bytes."""
        self._transport, self._loop, self._limits, self._share, self._count = transport, loop, limits, share, count
        self._limit = TimeLimit(loop)
        self._bytes, self._since_s = 0, 0.0  # unread bytes at the latest look, and its time
        self._held_bytes = 0  # size of a large answer that is not read to its end: the transport keeps it whole

    @property
    def size(self) -> int:
        """Bytes that the transport holds of a large answer."""
        return max(self._left(), self._held_bytes)

    def write(self, data: bytes) -> None:
        if len(data) > LARGE_BYTES and not self._transport.is_closing():
            self._transport.set_write_buffer_limits(0)  # writing is paused until the client has read everything
            self._held_bytes = len(data)
        self._transport.write(data)

    def expect_reading(self) -> None:
        """Start the time limit of what is written so far; an answer may be written in pieces."""
        self._bytes = self._left()
        if not self._bytes:
            self.let_go()
        self._count()
        if self._bytes and not self._limit.is_running:
            self._await_reading()

    def let_go(self) -> None:
        """Take note that a large answer has been read."""
        if self._held_bytes:
            self._held_bytes = 0
            # Over TLS, uvloop has no protocol to tell from the loss of a connection until `connection_lost` is called.
            if not self._transport.is_closing():
                self._transport.set_write_buffer_limits()

    def stop_waiting(self) -> None:
        self._limit.cancel()

    def press(self) -> None:
        """Abort a client that reads too slowly while memory is short."""
        left = self._left()
        if left < self._bytes:
            self._has_read(left)
        elif left and self._loop.time() - self._since_s > self._share.patience_s(self._limits.short_stall_s):
            self._share.close()
            self._transport.abort()

    def close(self) -> None:
        """End the time limit, because the connection is lost."""
        self.stop_waiting()
        self._count = _nothing  # breaks the reference cycle through the callback

    def _await_reading(self) -> None:
        self._since_s = self._loop.time()
        self._limit.start(self._limits.stall_s, self._check)

    def _check(self) -> None:
        """Abort if nothing of the answer was read since the last check."""
        left = self._left()
        if not left:
            return
        if left >= self._bytes:
            self._transport.abort()
            return
        self._has_read(left)
        self._await_reading()

    def _has_read(self, left: int) -> None:
        self._bytes, self._since_s = left, self._loop.time()
        self._count()

    def _left(self) -> int:
        return int(self._transport.get_write_buffer_size())
