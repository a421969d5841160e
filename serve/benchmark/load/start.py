"""Starting processes, which nothing that ends this one may tear in the middle."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

ENDINGS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block ends, and Ctrl-C for ever from the processes that it starts.

    Torn off, a process that has read half of what it is to do would print a traceback, and so would one that Ctrl-C reaches
    while it still imports.
    """
    if sys.platform == "win32":  # where processes start in another way, and no signal is sent to a group
        yield
        return
    resource_tracker.ensure_running()  # starting it later would let the signals in again
    held: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers, and are not torn off
        # The mask is not enough: another thread takes the signal, and Python raises in this one.
        handlers = {number: signal.signal(number, lambda came, _: held.append(came)) for number in ENDINGS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for came in held[:1]:
        signal.raise_signal(came)
