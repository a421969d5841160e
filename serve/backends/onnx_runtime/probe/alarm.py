"""Do something when its time has come, unless the time is put off: which is cheap here, where a timer is a thread each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Alarm:
    """Rings on a daemon thread of its own, which is there only while there is a time to wait for."""

    def __init__(self, ring: Callable[[], object]) -> None:
        """An alarm that is off.

        Args:
            ring: called when the time has come, and must not raise. It may still be under way when the alarm is put off.
        """
        self._ring = ring
        self._changed = threading.Condition()
        self._at_s: float | None = None
        self._looks_s: float | None = None  # when the thread wakes; None without one

    def set(self, in_s: float) -> None:
        """Ring in so many seconds, and not when it was set to ring before."""
        at_s = time.monotonic() + in_s
        with self._changed:
            self._at_s = at_s
            if self._looks_s is None:
                self._looks_s = at_s
                threading.Thread(target=self._watch, name="alarm", daemon=True).start()
            elif at_s < self._looks_s:
                self._changed.notify()

    def off(self) -> None:
        """Do not ring. The thread finds out in its own time: it is likely to be needed again."""
        with self._changed:
            self._at_s = None

    def stop(self) -> None:
        """Do not ring, and end the thread."""
        with self._changed:
            self._at_s = None
            self._changed.notify()

    def _watch(self) -> None:
        while self._came():
            self._ring()

    def _came(self) -> bool:
        """Wait for the time; False when the alarm is off."""
        with self._changed:
            while self._at_s is not None and (left_s := self._at_s - time.monotonic()) > 0:
                self._looks_s = self._at_s
                self._changed.wait(left_s)
            if self._at_s is None:
                self._looks_s = None
                return False
            self._at_s = None
            # Until it has rung nobody is asleep who would have to be woken.
            self._looks_s = -1.0
            return True
