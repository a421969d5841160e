"""One timer of the event loop for the deadlines and queue timeouts of many waiting requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

SWEEP_S: Final = 0.02  # least seconds between two searches, each of which visits many waiting requests
ROUNDING_S: Final = 0.001  # uvloop rounds timers to milliseconds, and an early search would find no late request


class DeadlineTimer:
    """Has waiting requests dropped when their time runs out, at most SWEEP_S later. On the event loop only."""

    __slots__ = ("_checked", "_drop_late", "_due", "_timer")

    def __init__(self, drop_late: Callable[[float], None]) -> None:
        """`drop_late`: fails the requests that are late at a time, in seconds, and calls `watch` for the others."""
        self._drop_late = drop_late
        self._timer: asyncio.TimerHandle | None = None
        self._due, self._checked = math.inf, -math.inf  # times of the next and the last search, on time.monotonic()'s clock

    def watch(self, deadline: float | None, leave_by: float | None = None) -> None:
        """Schedule a search for late requests, at the latest for the earlier of these times; None for no time."""
        if deadline is not None and deadline < self._due:
            self._schedule(deadline)
        if leave_by is not None and leave_by < self._due:
            self._schedule(leave_by)

    def stop(self) -> None:
        """Cancel the timer for good, which breaks a reference cycle."""
        self._cancel()
        self._drop_late = _nothing

    def _schedule(self, moment: float) -> None:
        self._cancel()
        self._due = moment
        delay_s = max(moment + ROUNDING_S, self._checked + SWEEP_S) - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._check)

    def _check(self) -> None:
        self._checked = time.monotonic()
        self._timer, self._due = None, math.inf
        self._drop_late(self._checked)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing(_: float) -> None:
    """Do nothing, because the timer has been stopped."""
