"""A server process that another process starts and watches. Imports only the standard library."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from halfserve.serve.fleet.member.handover import LOST_DEVICE_CODE, VARIABLE, Handover, Sockets

logger = logging.getLogger(__name__)

PACKAGE_ROOT = Path(__file__).parents[4]  # folder that contains the package `halfserve`
NOT_STARTED_CODE = 126  # shells' exit code for a program that cannot be started
HINTS: dict[int, str] = {
    9: "; out of memory, or by hand",  # SIGKILL, for which Windows has no name
    signal.SIGSEGV: "; a runtime or a driver crashed",
    signal.SIGABRT: "; a runtime or a driver gave up",
}


class WorkerProcess:
    """A server process started by the supervisor.

    Attributes:
        pid: its process id.
        ready_file: descriptor that becomes readable when the worker is ready or has ended.
        ready_s: time at which it became ready on time.monotonic()'s clock; None before.
        code: exit code of the process, or negative number of the signal that ended it; None while it runs.
    """

    def __init__(self, pid: int, ready_file: int | None, code: int | None = None) -> None:
        self.pid = pid
        self.ready_file = ready_file
        self.ready_s: float | None = None
        self.code = code
        self._started_s = time.monotonic()

    @property
    def lived_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    @property
    def served_s(self) -> float | None:
        """Seconds since it became ready; None if it never did."""
        return None if self.ready_s is None else time.monotonic() - self.ready_s

    def send(self, name: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, name)

    def read_ready(self) -> None:
        """Update `ready_s`; to be called when `ready_file` is readable."""
        if self.ready_file is not None:
            with contextlib.suppress(BlockingIOError):  # the worker has ended, but a child process of it holds the other end
                if os.read(self.ready_file, 1):
                    self.ready_s = time.monotonic()
            os.close(self.ready_file)
            self.ready_file = None

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.code = -signal.SIGKILL


def reap(workers: Sequence[WorkerProcess]) -> None:
    """Set the `code` of ended workers, and reap all other children: process 1 of a container inherits orphans."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            for worker in workers:
                if worker.pid == pid:
                    worker.code = os.waitstatus_to_exitcode(status)
                    worker.read_ready()


def start_worker(
    command: Sequence[str], sockets: Sockets, lifeline: int, handover: Callable[..., Handover], title: str
) -> WorkerProcess:
    """Start a worker that inherits these descriptors. A worker that cannot be started counts as ended.

    `handover` makes the worker's data from the descriptors; `title` names the worker in the log.
    """
    try:
        ready_file, ready = os.pipe()
    except OSError as error:  # too many open files
        logger.error("%s cannot be started: %s", title, error.strerror)  # noqa: TRY400  (the line says it all)
        return WorkerProcess(0, None, NOT_STARTED_CODE)
    os.set_blocking(ready_file, False)
    os.set_inheritable(ready, True)
    environment = {**os.environ, VARIABLE: handover(sockets=sockets, lifeline=lifeline, ready=ready).to_text()}
    try:
        # In a process group of its own: Ctrl-C in a terminal reaches only the supervisor, which passes it on once.
        pid = os.posix_spawn(command[0], list(command), environment, setpgroup=0, setsigdef=[signal.SIGPIPE])
    except OSError as error:  # too many processes, or the interpreter is being replaced
        logger.error("%s cannot be started: %s: %s", title, command[0], error.strerror)  # noqa: TRY400  (the line says it all)
        os.close(ready_file)
        return WorkerProcess(0, None, NOT_STARTED_CODE)
    finally:
        os.close(ready)
    return WorkerProcess(pid, ready_file)


def program(module: str) -> list[str]:
    """Return the command that runs a module of this installation."""
    # -P: modules in the current folder must not hide ours, unless it is the folder that contains ours.
    safe = [] if Path.cwd() == PACKAGE_ROOT else ["-P"]
    return [sys.executable, *safe, "-m", module]


def in_words(code: int) -> str:
    """Text for how a process ended, such as "exit code 3" or "SIGABRT"; negative codes are signals."""
    if code == LOST_DEVICE_CODE:
        return f"exit code {code}: its device was lost"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{name.name}{HINTS.get(name, '')}"


def exit_code(code: int) -> int:
    """Exit code that a shell would report."""
    return code if code >= 0 else 128 - code
