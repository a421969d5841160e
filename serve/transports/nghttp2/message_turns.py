"""How much of what has come on a connection's streams is read in one turn of the loop.

Five bytes can be a message, and each message costs as much as a request does: what one socket brings at a time may be more than
other clients should have to wait for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MESSAGES_A_TURN = 256  # of all streams of a connection
COUNTS_AS_ONE_BYTES = 2**16  # of a message


class MessageTurns:
    """Shares the turns of the loop among the streams of one connection."""

    __slots__ = ("_left", "_waiting")

    def __init__(self) -> None:
        self._left = MESSAGES_A_TURN
        self._waiting: deque[Callable[[], None]] = deque()

    def may_read(self) -> bool:
        """Whether a stream may read one more message in this turn; it is counted."""
        if not self._left:
            return False
        if self._left == MESSAGES_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin)
        self._left -= 1
        return True

    def spend(self, size: int) -> None:
        """Count a message of so many bytes, which may have been inflated, for as many small ones as take about as long."""
        self._left = max(0, self._left - size // COUNTS_AS_ONE_BYTES)

    def when_next(self, then: Callable[[], None]) -> None:
        """Call `then` in a later turn, behind the other streams that wait; for one that may not read more in this one."""
        self._waiting.append(then)

    def _begin(self) -> None:
        self._left = MESSAGES_A_TURN
        while self._left and self._waiting:
            self._waiting.popleft()()
