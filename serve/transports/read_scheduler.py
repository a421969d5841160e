"""Reads the connections of all protocols in turns, so that a crowd of them delays no other client for long.

Received bytes are read at once until a loop iteration has spent TURN_S or PIECES_A_TURN on reading. After that only small
input, such as a health check, is read at once. Other connections queue and are not polled meanwhile. In each later iteration a
few of them may fill a receive buffer, in the order of weighted fair queueing (Demers, Keshav and Shenker 1989). So a connection
with small requests, or a new one, does not wait until each of a crowd of uploads has had its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, Protocol
from weakref import WeakKeyDictionary

TURN_S = 0.0005
PIECES_A_TURN: Final = 4  # full receive buffers, or requests that start a task
SMALL_BYTES: Final = 4096
FEW_READERS: Final = 64  # number of readers with a tag before those whose tags have passed are forgotten


class Reader(Protocol):
    """A connection whose client has sent more than was read."""

    def read_on(self) -> None:
        """Use the bytes kept, if any, and listen to the socket again."""


class ReadScheduler:
    """The read queue of an event loop.

    Attributes:
        has_begun_turn: whether this loop iteration has spent time on reading, so that its time is limited.
    """

    __slots__ = (
        "_call_soon", "_clock", "_forget_at", "_granted", "_left", "_number", "_passed", "_queue", "_size", "_stop", "_tags",
        "has_begun_turn",
    )  # fmt: skip

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._call_soon = call_soon
        self._clock = clock
        # A heap of connections: when each would have read its bytes, had all read at one pace; the number in order of arrival;
        # when it would have begun; and the connection. The unit of time is a byte read by each waiting connection.
        self._queue: list[tuple[int, int, int, Reader]] = []
        self._number = 0
        self._passed = 0  # the present time
        self._tags: dict[Reader, int] = {}  # when a connection would have read all that it has sent, if that is not past
        self._size = SMALL_BYTES  # bytes of the connection that waits next
        self._forget_at = FEW_READERS
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
        """Return whether `size` received bytes must be read later, through `wait`."""
        if size <= SMALL_BYTES:
            return False
        if not self.has_begun_turn:
            self._begin()
        elif reader in self._granted:
            self._granted.remove(reader)
            self._charge(reader, size)
            return False
        elif not self._has_time():
            self._size = size
            return True
        if self._queue:
            self._charge(reader, size)
        self._left -= 1
        return False

    def wait(self, reader: Reader) -> None:
        """Queue a connection that listens no more; `read_on` is called once, in a later loop iteration."""
        self._number += 1
        start, end = self._charge(reader, self._size)
        self._size = SMALL_BYTES
        heappush(self._queue, (end, self._number, start, reader))
        if not self.has_begun_turn:
            self._begin()

    def _has_time(self) -> bool:
        return self._left > 0 and not self._queue and self._clock() <= self._stop

    def _charge(self, reader: Reader, size: int) -> tuple[int, int]:
        """Count `size` bytes of a connection; returns when it would begin and end to read them."""
        tags = self._tags
        start = max(self._passed, tags.get(reader, 0))
        tags[reader] = start + size
        if len(tags) > self._forget_at:
            self._tags = {one: tag for one, tag in tags.items() if tag > self._passed}
            self._forget_at = 2 * len(self._tags) + FEW_READERS
        return start, start + size

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
            self._passed = 0
            self._tags.clear()
            return
        self._begin()
        for _ in range(min(len(queue), self._left)):  # a connection with more input rejoins at the end
            end, _, start, reader = heappop(queue)
            self._passed = max(self._passed + (end - start) // (len(queue) + 1), start)
            self._left -= 1
            granted.add(reader)
            reader.read_on()
            if clock() > self._stop:
                break


_schedulers: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadScheduler] = WeakKeyDictionary()


def read_scheduler() -> ReadScheduler:
    """Return the scheduler of the running event loop: all its servers share the loop's time."""
    loop = asyncio.get_running_loop()
    found = _schedulers.get(loop)
    if found is None:
        found = _schedulers[loop] = ReadScheduler(lambda look: asyncio.get_running_loop().call_soon(look))
    return found
