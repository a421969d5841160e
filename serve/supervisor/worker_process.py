"""The worker, as its supervisor sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence

from serve.supervisor.handover import VARIABLE, Handover, Sockets

logger = logging.getLogger(__name__)

NOT_STARTED_CODE = 126  # as shells report a program that they cannot start


class WorkerProcess:
    """A server process that was started.

    Attributes:
        pid: the operating system's number for it.
        ready_file: can be read when it has got ready, or has ended.
        ready_s: when it got ready, on time.monotonic()'s clock; None before.
        code: how it ended: an exit code, or a signal's number with a minus; None before.
    """

    def __init__(self, pid: int, ready_file: int | None, code: int | None = None) -> None:
        self.pid = pid
        self.ready_file = ready_file
        self.ready_s: float | None = None
        self.code = code
        self._started_s = time.monotonic()

    @property
    def lived_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started_s

    @property
    def served_s(self) -> float | None:
        """Seconds since it got ready; None if it never did."""
        return None if self.ready_s is None else time.monotonic() - self.ready_s

    def send(self, name: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        if self.code is None:
            os.kill(self.pid, name)

    def look(self) -> None:
        """Take note of whether it is ready; to be called when `ready_file` can be read."""
        if self.ready_file is not None:
            with contextlib.suppress(BlockingIOError):  # it has ended, and a process that it left behind holds the other end
                if os.read(self.ready_file, 1):
                    self.ready_s = time.monotonic()
            os.close(self.ready_file)
            self.ready_file = None

    def reap(self) -> None:
        """Take note of whether it has ended, and of every other child: process 1 of a container gets those of others."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.code = os.waitstatus_to_exitcode(status)
                    self.look()

    def kill(self) -> None:
        """End it now."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.code = -signal.SIGKILL


def start_worker(command: Sequence[str], sockets: Sockets, lifeline: int, restarts: int) -> WorkerProcess:
    """Start a worker that has these files. One that cannot be started is one that has ended."""
    try:
        ready_file, ready = os.pipe()
    except OSError as error:  # no room for one more file, in the whole system maybe
        logger.error("the worker cannot be started: %s", error.strerror)  # noqa: TRY400  (the line says it all)
        return WorkerProcess(0, None, NOT_STARTED_CODE)
    os.set_blocking(ready_file, False)
    os.set_inheritable(ready, True)
    environment = {**os.environ, VARIABLE: Handover(sockets, lifeline, ready, restarts).to_text()}
    try:
        # In a process group of its own: Ctrl-C in a terminal is for the supervisor, which passes it on once.
        pid = os.posix_spawn(command[0], list(command), environment, setpgroup=0, setsigdef=[signal.SIGPIPE])
    except OSError as error:  # no room for one more process, or the interpreter is being replaced
        logger.error("the worker cannot be started: %s: %s", command[0], error.strerror)  # noqa: TRY400  (the line says it all)
        os.close(ready_file)
        return WorkerProcess(0, None, NOT_STARTED_CODE)
    finally:
        os.close(ready)
    return WorkerProcess(pid, ready_file)
