"""Stay awake for a moment after an answer, where requests come one by one and the next usually comes within it.

A thread that sleeps until its sockets have something to read is woken by the system, which on a virtual machine takes longer
than to answer a request. While something is to be called soon, the event loop looks at its sockets without falling asleep.
Where many requests are in flight it sleeps as it did: what comes meanwhile shares a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LINGER_S = 250e-6
MOST = 8  # successes that count: after a few failures in a row there is no more lingering
FAILURE = 2  # takes away what so many successes gave
TRY_EVERY = 64  # answers, where it has not been worth it: an idle core is spent on no more than that


class Linger:
    """Learns whether to linger. Lives on the event loop."""

    __slots__ = ("_call_soon", "_clock", "_lingers", "_passed_by", "_until", "_worth")

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = time.monotonic) -> None:
        """One that knows nothing of the clients yet.

        Args:
            call_soon: the event loop's.
            clock: in seconds.
        """
        self._call_soon = call_soon
        self._clock = clock
        self._until = 0.0
        self._lingers = False
        self._worth = 0
        self._passed_by = 0

    def answered(self, *, alone: bool) -> None:
        """An answer has gone out, `alone` or together with others."""
        if not alone:
            self._until = 0.0
            return
        if self._lingers:
            self._until = self._clock() + LINGER_S
            self._worth = min(self._worth + 1, MOST)
            return
        self._passed_by += 1
        if self._worth or self._passed_by >= TRY_EVERY:
            self._passed_by = 0
            self._lingers = True
            self._until = self._clock() + LINGER_S
            self._call_soon(self._look)

    def _look(self) -> None:
        if self._clock() < self._until:
            self._call_soon(self._look)
        else:
            self._lingers = False
            self._worth = max(0, self._worth - FAILURE)
