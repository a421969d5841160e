"""The requests that one step of an ensemble may have in flight (`max_inflight_requests`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class StepLimit:
    """Bounds the requests to a step's model, over all requests of the ensemble; further ones wait in order.

    Lives on the event loop.
    """

    __slots__ = ("_free", "_is_admitting", "_waiting")

    def __init__(self, most: int) -> None:
        self._free = most
        self._is_admitting = False
        self._waiting: deque[Callable[[], bool]] = deque()

    def enter(self, send: Callable[[], bool]) -> None:
        """Call `send` once the step has room, at once if it has; `send` returns False if the request is no longer wanted."""
        self._waiting.append(send)
        self._admit()

    def leave(self) -> None:
        """Make room, because a request that was sent has ended."""
        self._free += 1
        self._admit()

    def _admit(self) -> None:
        if self._is_admitting:  # a request that was sent has ended at once; the loop below sees its room
            return
        self._is_admitting = True
        try:
            while self._free and self._waiting:
                self._free -= 1
                if not self._waiting.popleft()():
                    self._free += 1
        finally:
            self._is_admitting = False
