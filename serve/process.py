"""Process of the server: signals, garbage collection, turns of threads, and an exit despite stuck runtime threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from halfserve.serve.engine.disk_files import remove_temporary_folders

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A request in flight has about ten tracked objects. With Python's threshold of 700 new objects, the collector would scan those
# of 64 requests at each batch and find no reference cycles: 7 % of the server's time for a request. The test
# tests/serve/transports/nghttp2/test_server.py checks that requests, even refused and cancelled ones, leave no cycles. A
# collection stops every request for 0.05 to 0.5 us an object, the latter where the processor's caches are cold.
NEW_OBJECTS = 2_000
YOUNG_COLLECTIONS = 0  # more than this many have the middle generation collected too: up to twice NEW_OBJECTS
# The same for the oldest generation, which holds all that lives long: `collect_when_idle` looks after it, unless a server is
# busy for so long that it has kept 4 million new objects.
MIDDLE_COLLECTIONS = 1_000
DUE_COLLECTIONS = 10  # of the middle generation, after which an idle moment is used for the oldest one: Python's threshold
IDLE_PART = 0.05  # share of LOOK_S: an event loop that used less processor time is idle
LOOK_S = 1.0
SWITCH_S = 0.0001
JOIN_S = 0.5  # time limit for all threads together


def stop_on_signal() -> asyncio.Event:
    """Create an event that the first SIGTERM or SIGINT sets. A second one ends the process at once, with code 143 or 130."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def receive(name: signal.Signals) -> None:
        if stop.is_set():
            logging.shutdown()
            os._exit(128 + name)
        stop.set()

    for name in STOP_SIGNALS:
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            loop.add_signal_handler(name, receive, name)
    return stop


def ignore_hang_up() -> None:
    """Ignore SIGHUP until `Security` uses it as the signal to reread the token and certificate files."""
    with contextlib.suppress(AttributeError):  # Windows does not have it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def infrequent_collection() -> Iterator[None]:
    """Exempt existing objects from garbage collection, and collect new ones less often and few at a time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let a thread that runs Python code keep the interpreter lock for SWITCH_S while others wait, in place of 5 ms.

    The event loop releases the lock whenever it waits for sockets, and around each callback of libuv. Each time it would wait
    5 ms for every thread that loads a model, reads JSON or describes tokens.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(min(SWITCH_S, before_s))
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


async def collect_when_idle() -> NoReturn:
    """Collect the oldest generation, if that is due, after a second in which the event loop had next to nothing to do."""
    spent_s = time.thread_time()
    while True:
        await asyncio.sleep(LOOK_S)
        before_s, spent_s = spent_s, time.thread_time()
        if gc.get_count()[2] > DUE_COLLECTIONS and spent_s - before_s < IDLE_PART * LOOK_S:
            gc.collect()


def leave_threads_behind(code: int = 0) -> None:
    """Exit with this code if a thread is still inside a runtime; otherwise return.

    Such a thread cannot be stopped. At interpreter shutdown Python terminates it as soon as it returns from the runtime, on
    which C++ calls std::terminate: the process would end with SIGABRT after a clean shutdown.
    """
    until_s = time.monotonic() + JOIN_S
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """Exit at once: flush output and remove temporary folders, but clean up nothing else."""
    remove_temporary_folders()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
