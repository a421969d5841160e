"""Gathers the next batch of a model instance while the instance computes.

Copying large inputs takes a good part of the time in which a device computes them: 2 ms for 32 images of 602 KB, beside 4 ms.
So a second thread of the instance joins the next batch, in a second set of buffers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.execution.assembly import BatchBuffers, GatheredBatch, use_buffers
from halfserve.serve.engine.execution.batch_runner import PreparedBatch
from halfserve.serve.engine.requests import InferRequest

logger = logging.getLogger(__name__)

# Copying fewer bytes takes 0.1 ms at most, and waking another thread takes nearly as long.
STAGED_BYTES: Final = 1 << 20


class StagedBatch(PreparedBatch):
    """A batch that is gathered before its turn, unless its turn comes first.

    Attributes:
        buffers: the buffers in which it is gathered.
        gathered: the gathered batch, after `take`; None if the caller of `take` has to gather it.
    """

    __slots__ = ("_begun", "_ended", "_gather", "buffers", "gathered")

    def __init__(self, buffers: BatchBuffers, gather: Callable[[], GatheredBatch]) -> None:
        """`gather` joins the batch in the calling thread's buffers, which will be `buffers`."""
        self.buffers = buffers
        self._gather = gather
        self._begun = threading.Lock()  # taken by the first of the two threads
        self._ended = threading.Lock()  # released when the batch is gathered
        self._ended.acquire()
        self.gathered: GatheredBatch | None = None

    def stage(self) -> None:
        """Gather the batch, unless its turn has come; to be called on the staging thread."""
        if not self._begun.acquire(blocking=False):
            return
        use_buffers(self.buffers)
        try:
            self.gathered = self._gather()
        except Exception as error:  # noqa: BLE001  (the instance's thread meets it again, and finds the request at fault)
            logger.debug("a batch was not gathered before its turn: %s", error)
        finally:
            self._ended.release()

    def take(self) -> None:
        """Wait until the batch is gathered, if that has begun; to be called once, at the batch's turn."""
        started = time.monotonic_ns()
        if self._begun.acquire(blocking=False):
            return
        self._ended.acquire()
        if self.gathered is not None:
            self.gathered.started = started


class Staging:
    """The staging thread of one instance, and the buffers of its batches: the running one's, and the next one's.

    Attributes:
        buffers: the two sets of buffers. Without large batches, the second stays empty.
    """

    __slots__ = ("_name", "_worker", "buffers")

    def __init__(self, name: str) -> None:
        """`name`: name of the thread, which the first large batch starts."""
        self._name = name
        self._worker: Worker | None = None
        self.buffers = (BatchBuffers(), BatchBuffers())

    def other(self, buffers: BatchBuffers) -> BatchBuffers:
        """Return the set that is free while a batch is computed from `buffers`, for the same device."""
        first, second = self.buffers
        free = second if buffers is first else first
        free.device_id = buffers.device_id
        return free

    def run(self, function: Callable[..., object], *arguments: Any) -> bool:
        """Call a function on the thread; returns False if the process may start no more threads."""
        if self._worker is None:
            try:
                self._worker = Worker(self._name)
            except RuntimeError:
                return False
        self._worker.submit(function, *arguments)
        return True

    def stop(self) -> None:
        """End the thread after the submitted calls, without waiting for it."""
        if self._worker is not None:
            self._worker.stop()


def is_worth_staging(requests: Sequence[InferRequest]) -> bool:
    """Return whether copying a batch takes long. A lone request's inputs are mostly computed where they were received."""
    return len(requests) > 1 and sum([request.size for request in requests]) >= STAGED_BYTES
