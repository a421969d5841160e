"""Have Python's threads take shorter turns while a model is loaded beside the event loop.

A thread that runs Python code keeps Python's lock for as long as `sys.getswitchinterval()` says, 5 ms, while the others wait.
The event loop gives the lock away whenever it waits for sockets, so that it would meet such turns again and again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 0.00005


class ShortTurns:
    """Turns of TURN_S while anyone is within. They are the whole process's, and so is this: `SHORT_TURNS` is for all to use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._within = 0
        self._before_s = TURN_S

    @contextmanager
    def during(self) -> Iterator[None]:
        """Within, turns take TURN_S at most; once nobody is within any more, as long as they took before."""
        with self._lock:
            self._within += 1
            if self._within == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(TURN_S, self._before_s))
        try:
            yield
        finally:
            with self._lock:
                self._within -= 1
                if self._within == 0:
                    sys.setswitchinterval(self._before_s)


SHORT_TURNS = ShortTurns()
