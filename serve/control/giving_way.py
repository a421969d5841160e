"""Have a thread that is in no hurry give way to those that answer requests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Threads that were as others when they were looked at. A server of a thousand models has thousands, and looks after each load.
_seen: set[str] = set()


@contextmanager
def giving_way() -> Iterator[None]:
    """Within, the calling thread does not displace others that run when it wakes; a process started within never does.

    Its share of a core stays what it is. Niceness would take from that, too: on a busy machine the thread would stand for long
    with Python's lock in its hand. Threads that are started within are as others afterwards.

    Only Linux tells such threads apart, and only where the process is scheduled as usual is anything changed.
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
    """This thread, and those that have inherited from it: a runtime starts its own, which compute for requests."""
    new = {"0"}
    # Where as many files are open as may be, or /proc is not there, the others wait until the next time.
    with contextlib.suppress(OSError):
        there = set(os.listdir("/proc/self/task"))  # noqa: PTH208  (names are all that is wanted)
        new |= there - _seen
        _seen.intersection_update(there)  # a number may be another thread's later
    for thread in new:
        with contextlib.suppress(OSError):  # it has ended
            if os.sched_getscheduler(int(thread)) == os.SCHED_BATCH:
                os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
    _seen.update(new)
