"""Do something now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ClockWatch:
    """Looks at the clock again and again: an alarm that is set for a time would miss it when the clock jumps."""

    def __init__(self, interval_s: float, look: Callable[[], None]) -> None:
        """A watch that has not begun.

        Args:
            interval_s: seconds between two looks.
            look: is called on the event loop.
        """
        self._interval_s = interval_s
        self._look = look
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; on the event loop."""
        self._next = asyncio.get_running_loop().call_later(self._interval_s, self._tick)

    def close(self) -> None:
        """End that."""
        if self._next is not None:
            self._next.cancel()

    def _tick(self) -> None:
        self.start()
        self._look()
