"""Worker threads, and two measures that keep long work on them, such as loading a model, from delaying requests:
pauses between its steps, and Linux's SCHED_BATCH.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

Job = tuple[Callable[..., object], tuple[Any, ...]]
PAUSE_S = 0.002  # time for the event loop to catch up
_PAUSES = ContextVar("pauses", default=False)


class Worker:
    """Runs jobs in order on a daemon thread of its own.

    Unlike an executor's thread, it does not keep the process from ending while a model never returns, and a job makes no
    future.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run `function(*arguments)` after the jobs submitted before. The function must not raise."""
        self._jobs.put((function, arguments))

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run `function(*arguments)` after the jobs submitted before, and wait for its end; its errors pass through."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001  (the caller gets every error)
                done.set_exception(error)
            else:
                done.set_result(None)

        self.submit(run)
        done.result()

    @property
    def has_next(self) -> bool:
        """Whether a job waits for the end of the running one."""
        return not self._jobs.empty()

    def stop(self) -> None:
        """End the thread after the submitted jobs, without waiting for it."""
        self._jobs.put(None)

    def hand_over(self, other: Worker) -> None:
        """Give the waiting jobs to another worker, and end after the running job, if that ever returns."""
        with suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                other.submit(job[0], *job[1])
        self.stop()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, arguments = job
            function(*arguments)
            del job, function, arguments  # otherwise they would keep a batch alive until the next job


@contextmanager
def pausing(*, pauses: bool = True) -> Iterator[None]:
    """Let `pause` sleep on the calling thread within this context."""
    token = _PAUSES.set(pauses)
    try:
        yield
    finally:
        _PAUSES.reset(token)


def pause() -> None:
    """Sleep for PAUSE_S within `pausing`; do nothing elsewhere. Call it between steps of long work, with no lock held."""
    if _PAUSES.get():
        time.sleep(PAUSE_S)


# Ids of threads known to have the default policy: a server of a thousand models has thousands, and checks them after each load.
_seen: set[str] = set()


@contextmanager
def sched_batch() -> Iterator[None]:
    """Keep the calling thread from preempting running threads when it wakes, and processes started in this context too.

    Its share of a core stays, unlike with niceness, under which it would hold Python's lock for long on a busy machine. Threads
    that are started within are reset afterwards. Only on Linux, and only if the scheduling policy is the default one.
    """
    changed = False
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a sandbox forbids it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    try:
        yield
    finally:
        if changed:
            _as_before()


def _as_before() -> None:
    """Reset this thread and the threads that it has started: a runtime starts its compute threads while it loads."""
    new = {"0"}
    # Without /proc or a free file descriptor, the other threads are reset the next time.
    with contextlib.suppress(OSError):
        there = set(os.listdir("/proc/self/task"))  # noqa: PTH208  (names are all that is wanted)
        new |= there - _seen
        _seen.intersection_update(there)  # ids are reused
    for thread in new:
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getscheduler(int(thread)) == os.SCHED_BATCH:
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
    _seen.update(new)
