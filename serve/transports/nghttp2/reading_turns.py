"""Reading is shared out: however much many connections have sent at once, none keeps the event loop from the others for long.

What has come is read as it is found until a turn of the loop has read for some milliseconds. After that only what is small is
read at once, such as a question after readiness; the rest waits in a line, whose connections are read a piece at a time, in
order, and are not listened to meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

TURN_S = 0.002
SMALL_BYTES = 4096
CROWD = 16  # connections, each with as much as is read from a socket at a time


class Reader(Protocol):
    """A connection with bytes that have come and are not read."""

    def read_on(self) -> None:
        """Read some of them."""


class ReadingTurns:
    """The line of a server. Lives on the event loop."""

    __slots__ = ("_call_soon", "_clock", "_line", "_looks_soon", "_stop")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = time.monotonic) -> None:
        """An empty one.

        Args:
            call_soon: the event loop's.
            clock: in seconds.
        """
        self._call_soon = call_soon
        self._clock = clock
        self._line: deque[Reader] = deque()
        self._looks_soon = False
        self._stop = 0.0  # when this turn will have read enough; known while `_look` is to be called

    @property
    def is_crowded(self) -> bool:
        """Whether so many wait that what else comes is better left where it is, a little of it excepted."""
        return len(self._line) >= CROWD

    def must_wait(self, size: int) -> bool:
        """Whether so many bytes that have just come are to be read later: `wait` then."""
        if size <= SMALL_BYTES:
            return False
        now = self._clock()
        if not self._looks_soon:
            self._look_soon(now + TURN_S)
        return now > self._stop

    def wait(self, reader: Reader) -> None:
        """Stand in line; `read_on` is called once, in a later turn of the loop."""
        self._line.append(reader)
        if not self._looks_soon:
            self._look_soon(self._clock() + TURN_S)

    def _look_soon(self, stop: float) -> None:
        self._looks_soon, self._stop = True, stop
        self._call_soon(self._look)

    def _look(self) -> None:
        """Begin another turn, with those that wait."""
        line, clock = self._line, self._clock
        stop = clock() + TURN_S
        try:
            for _ in range(len(line)):  # whoever has still more after its piece stands at the end
                line.popleft().read_on()
                if clock() > stop:
                    break
        finally:
            self._looks_soon = False
            if line:
                self._look_soon(stop)
