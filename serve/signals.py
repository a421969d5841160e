"""What ends the server: a first signal asks it to, a second one does not ask. And what must not end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signal() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. A second one ends the process at once, with code 143 or 130."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def receive(name: signal.Signals) -> None:
        if stop.is_set():
            logging.shutdown()
            os._exit(128 + name)
        stop.set()

    for name in SIGNALS:
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            loop.add_signal_handler(name, receive, name)
    return stop


def ignore_hang_up() -> None:
    """Let SIGHUP pass until the server reads its files: from then on it has them read again (see `Security`)."""
    with contextlib.suppress(AttributeError):  # Windows does not have it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
