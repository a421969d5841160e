"""Log lines that any stranger can bring about, as often as he likes."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST = 10
PERIOD_S = 60.0


class Seldom:
    """Writes the first few lines of each minute, and how many others there were: a log must not fill the disk."""

    def __init__(self, log: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        """One that has written nothing yet.

        Args:
            log: such as `logger.info`.
            clock: in seconds.
        """
        self._log = log
        self._clock = clock
        self._begun_s = -PERIOD_S
        self._count = 0

    def say(self, text: str, *values: object) -> None:
        """Write a line, if there have not been too many; `values` as for `logger.info`."""
        now_s = self._clock()
        if now_s - self._begun_s >= PERIOD_S:
            if self._count > MOST:
                self._log("%d lines like these were left out in the last %.0f s", self._count - MOST, now_s - self._begun_s)
            self._begun_s, self._count = now_s, 0
        self._count += 1
        if self._count <= MOST:
            self._log(text, *values)
