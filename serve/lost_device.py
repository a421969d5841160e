"""What becomes of a server whose device does not compute for its process any more.

After certain errors CUDA gives a process nothing but errors; only another process gets the device back.
"""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

DRAIN_S = 1.0  # for other models to answer what they have taken, where they compute elsewhere


class LostDeviceError(Exception):
    """A device does not compute for this process any more."""


class LostDevice:
    """Ends a server that a supervisor starts anew; says so where there is none. Lives on the event loop."""

    def __init__(self, stop: asyncio.Event, *, is_supervised: bool) -> None:
        """Nothing is lost yet.

        Args:
            stop: ends the server when it is set.
            is_supervised: whether another process takes over.
        """
        self._stop = stop
        self._is_supervised = is_supervised
        self._told: str | None = None

    def tell(self, fault: str) -> None:
        """A copy of a model was lost with its device, and could not be loaded anew for the same reason."""
        if self._told is not None:
            return
        self._told = fault
        if not self._is_supervised:
            logger.error("a device computes for this process no more; with --supervise another process would take over now")
        elif not self._stop.is_set():
            logger.error("a device computes for this process no more; another process takes over")
            self._stop.set()

    def shorten(self, seconds: float) -> float:
        """A time in which the server leaves; what it waits for then may never come."""
        return seconds if self._told is None or not self._is_supervised else min(seconds, DRAIN_S)

    def check(self) -> None:
        """To be called in the end.

        Raises:
            LostDeviceError: that was the reason.
        """
        if self._told is not None and self._is_supervised:
            raise LostDeviceError(self._told)
