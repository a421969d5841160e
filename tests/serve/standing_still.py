"""An event loop whose process can stand still, as one that is stopped, or whose machine sleeps, and then goes on."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable

Found = list[tuple[selectors.SelectorKey, int]]


class _Interrupted(selectors.DefaultSelector):
    """The system interrupts a process that waits for its sockets when it is stopped; by then the time to wait is over."""

    def __init__(self) -> None:
        super().__init__()
        self.now = False

    def select(self, timeout: float | None = None) -> Found:
        if self.now:
            self.now = False
            return []
        return super().select(timeout)


class StandingLoop(asyncio.SelectorEventLoop):
    """Its clock is the monotonic one, and what it has stood still in all."""

    def __init__(self) -> None:
        self._interrupted = _Interrupted()
        self._stood_s = 0.0
        super().__init__(self._interrupted)

    def time(self) -> float:
        return super().time() + self._stood_s

    def stand_still(self, seconds: float, meanwhile: Callable[[], object]) -> None:
        """Stand still for so long, `meanwhile` being what others do. To be called on the loop.

        As after SIGCONT, it looks at the clock first and at its sockets then.
        """
        meanwhile()
        self._stood_s += seconds
        self._interrupted.now = True
