"""Outputs of batches that wait to be serialized, which hold up further batches with large outputs."""

from __future__ import annotations

import threading
from typing import Final

MOST_BYTES: Final = 2**24
LARGE_BYTES: Final = 2**20
LONGEST_WAIT_S: Final = 0.25  # so that nothing waits for long if a thread that serializes is stuck


class OutputBacklog:
    """The outputs that wait to be serialized: `BACKLOG` counts those of all models that threads serialize.

    They count for the memory budget once they are serialized. If the event loop serialized what is too much, it would delay all
    requests. So the threads of model instances whose last batch had large outputs wait before the next one. The responses of
    decoupled models are serialized on the event loop one at a time; each copy of such a model has a backlog of its own.

    Attributes:
        size: bytes of the outputs that wait.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size = 0
        self._most = most_bytes
        self._condition = threading.Condition()
        self._is_awaited = False

    def add(self, size: int) -> None:
        """Count outputs that begin to wait."""
        with self._condition:
            self.size += size

    def remove(self, size: int) -> None:
        """Count outputs no longer, and let threads go on if few are left."""
        with self._condition:
            self.size -= size
            if self._is_awaited and self.size <= self._most:
                self._is_awaited = False
                self._condition.notify_all()

    def wait(self) -> None:
        """Wait while too many bytes wait, for LONGEST_WAIT_S at most; to be called on a thread that makes outputs."""
        with self._condition:
            if self.size > self._most:
                self._is_awaited = True
                self._condition.wait(LONGEST_WAIT_S)


BACKLOG: Final = OutputBacklog()
