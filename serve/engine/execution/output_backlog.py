"""Outputs of batches that wait to be serialized, which hold up further batches with large outputs."""

from __future__ import annotations

import threading
from typing import Final

MOST_BYTES: Final = 2**24
LARGE_BYTES: Final = 2**20
LONGEST_WAIT_S: Final = 0.25  # so that nothing waits for long if a thread that serializes is stuck


class OutputBacklog:
    """The outputs that wait for the threads that serialize them, over all models: use the one instance, `BACKLOG`.

    They count for the memory budget once they are serialized. If the event loop serialized what is too much, it would delay all
    requests. So the threads of model instances whose last batch had large outputs wait before the next one.

    Attributes:
        size: bytes of the outputs that wait. Changed on the event loop only.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size = 0
        self._most = most_bytes
        self._condition = threading.Condition()
        self._is_awaited = False

    def add(self, size: int) -> None:
        """Count outputs that begin to wait."""
        self.size += size

    def remove(self, size: int) -> None:
        """Count outputs no longer, and let threads go on if few are left."""
        self.size -= size
        if self._is_awaited and self.size <= self._most:
            with self._condition:
                self._is_awaited = False
                self._condition.notify_all()

    def wait(self) -> None:
        """Wait while too many bytes wait, for LONGEST_WAIT_S at most; to be called on an instance's thread."""
        with self._condition:
            self._is_awaited = True  # first: the event loop may remove bytes meanwhile
            if self.size > self._most:
                self._condition.wait(LONGEST_WAIT_S)


BACKLOG: Final = OutputBacklog()
