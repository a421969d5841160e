"""Reads the connections of all protocols in turns, so that a crowd of them delays no other client for long.

Received bytes are read at once until a loop iteration has spent TURN_S or PIECES_A_TURN on reading. After that only small
input, such as a health check, is read at once. Other connections queue and are not polled meanwhile. In each later iteration a
few of them, in order, may fill a receive buffer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakKeyDictionary

TURN_S = 0.0005
PIECES_A_TURN: Final = 4  # full receive buffers, or requests that start a task
SMALL_BYTES: Final = 4096


class Reader(Protocol):
    """A connection whose client has sent more than was read."""

    def read_on(self) -> None:
        """Use the bytes kept, if any, and listen to the socket again."""


class ReadScheduler:
    """The read queue of an event loop.

    Attributes:
        has_begun_turn: whether this loop iteration has spent time on reading, so that its time is limited.
    """

    __slots__ = ("_call_soon", "_clock", "_granted", "_left", "_queue", "_stop", "has_begun_turn")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._queue: deque[Reader] = deque()
        self._granted: set[Reader] = set()  # have left the queue in this iteration, and have not read their socket yet
        self.has_begun_turn = False
        self._stop, self._left = 0.0, 0  # when, and after how many pieces, this iteration has read enough; in a turn

    def receive_bytes(self, reader: Reader, most: int) -> int:
        """Bytes to read from a socket at once, up to `most`.

        After a spent turn it is one byte over "small": uvloop would read on if small input filled the buffer, and larger input
        queues after the first read.
        """
        if not self.has_begun_turn or reader in self._granted or self._has_time():
            return most
        return SMALL_BYTES + 1

    def must_wait(self, reader: Reader, size: int) -> bool:
        """Whether `size` received bytes must be read later, through `wait`."""
        if size <= SMALL_BYTES:
            return False
        if not self.has_begun_turn:
            self._begin()
        elif reader in self._granted:
            self._granted.remove(reader)
            return False
        elif not self._has_time():
            return True
        self._left -= 1
        return False

    def wait(self, reader: Reader) -> None:
        """Queue a connection that listens no more; `read_on` is called once, in a later loop iteration."""
        self._queue.append(reader)
        if not self.has_begun_turn:
            self._begin()

    def _has_time(self) -> bool:
        return self._left > 0 and not self._queue and self._clock() <= self._stop

    def _begin(self) -> None:
        """Begin a turn, which lasts until the loop has read its sockets."""
        self.has_begun_turn = True
        self._stop, self._left = self._clock() + TURN_S, PIECES_A_TURN
        self._call_soon(self._look)

    def _look(self) -> None:
        """Let the first of the queue read."""
        queue, granted, clock = self._queue, self._granted, self._clock
        self.has_begun_turn = False
        granted.clear()
        if not queue:
            return
        self._begin()
        for _ in range(min(len(queue), self._left)):  # a connection with more input rejoins at the end
            reader = queue.popleft()
            self._left -= 1
            granted.add(reader)
            reader.read_on()
            if clock() > self._stop:
                break


_schedulers: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadScheduler] = WeakKeyDictionary()


def read_scheduler() -> ReadScheduler:
    """The scheduler of the running event loop: all its servers share the loop's time."""
    loop = asyncio.get_running_loop()
    found = _schedulers.get(loop)
    if found is None:
        found = _schedulers[loop] = ReadScheduler(lambda look: asyncio.get_running_loop().call_soon(look))
    return found
