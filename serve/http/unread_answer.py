"""The part of an answer that a client has not read, and the time in which it must read on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from halfserve.serve.http.http_options import MOMENT_S, HttpLimits
from halfserve.serve.security.memory_budget import MemoryShare

LARGE_BYTES = 16_384  # smaller buffers are not counted


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
        if len(data) > LARGE_BYTES:
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
