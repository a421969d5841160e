"""The supervisor: starts one worker at a time, and the next one when it ends. Imports the standard library alone."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Sequence

from halfserve.serve.supervisor.handover import LOST_DEVICE_CODE, VARIABLE, Handover, Sockets, SupervisorPlan

logger = logging.getLogger(__name__)

STOPS = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = signal.SIGHUP
NOT_STARTED_CODE = 126  # as shells report a program that they cannot start
FIRST_S, LONGEST_S = 0.1, 10.0
FORGET_AFTER_S = 60.0
GIVE_UP_AFTER = 5
HINTS = {
    signal.SIGKILL: "; out of memory, or by hand",
    signal.SIGSEGV: "; a runtime or a driver crashed",
    signal.SIGABRT: "; a runtime or a driver gave up",
}


class Supervisor:
    """Keeps a worker alive behind sockets that stay open between two workers."""

    def __init__(self, plan: SupervisorPlan, command: Sequence[str]) -> None:
        """A supervisor without a worker.

        Args:
            plan: its sockets.
            command: starts a worker; its first word is the path of a program.
        """
        self._sockets = dict(plan.sockets)
        self._command = command
        self._backoff = Backoff()
        self._stopped_by: signal.Signals | None = None
        self._forced_by: signal.Signals | None = None
        self._has_served = False
        # Never written: a worker notices the end of this process by the end of the pipe.
        self._lifeline, self._held = os.pipe()
        os.set_inheritable(self._lifeline, True)

    def run(self) -> int:
        """Supervise until a signal, or until restarting is pointless; the exit code."""
        try:
            with signal_reader([*STOPS, PASSED_ON, signal.SIGCHLD]) as signals:
                return self._keep_alive(signals)
        finally:
            self._close_sockets()
            os.close(self._lifeline)
            os.close(self._held)

    def _keep_alive(self, signals: SignalReader) -> int:
        restarts = 0
        while True:
            worker = start_worker(self._command, self._sockets, self._lifeline, restarts)
            code = self._watch(worker, signals)
            if self._stopped_by is not None:
                return self._code_of_stop(worker, code)
            self._has_served |= worker.ready_s is not None
            if not self._has_served:
                if code < 0:  # after an exit the worker has said itself what is wrong
                    logger.error("the server ended before it was ready: %s", in_words(code))
                return exit_code(code)
            wait_s = self._backoff.ended(worker.served_s)
            if self._backoff.never_ready >= GIVE_UP_AFTER:
                times, reason = self._backoff.never_ready, in_words(code)
                logger.error(
                    "the worker ended %d times in a row before it was ready, at last with %s; giving up", times, reason
                )
                return exit_code(code)
            after = "before it was ready" if worker.served_s is None else f"after {worker.lived_s:.1f} s"
            when = f"in {wait_s:g} s" if wait_s else "now"
            logger.warning(
                "the worker (process %d) ended %s: %s; the next one starts %s", worker.pid, after, in_words(code), when
            )
            if not _pause(signals, wait_s):
                return 0
            restarts += 1

    def _watch(self, worker: WorkerProcess, signals: SignalReader) -> int:
        """Wait for a worker's end and pass signals on; returns how it ended."""
        while worker.code is None:
            received, readable = signals.wait([] if worker.ready_file is None else [worker.ready_file], None)
            if readable:
                worker.read_ready()
            worker.reap()
            for name in set(received):
                if name in STOPS:
                    self._stop(name, worker)
                elif name == PASSED_ON and worker.ready_s is not None:  # a starting worker reads its files anyway
                    worker.send(name)
        return worker.code

    def _stop(self, name: signal.Signals, worker: WorkerProcess) -> None:
        if self._stopped_by is not None:
            self._forced_by = name
            worker.kill()
            return
        self._stopped_by = name
        worker.send(signal.SIGTERM)  # also for SIGINT, which a starting worker would answer with a stack trace
        self._close_sockets()  # otherwise clients could still connect while the worker drains

    def _code_of_stop(self, worker: WorkerProcess, code: int) -> int:
        if self._forced_by is not None:
            return 128 + self._forced_by
        if code != -signal.SIGTERM or self._stopped_by is None:
            return exit_code(code)
        if worker.ready_s is None and self._has_served:
            return 0  # a restarted worker that had accepted nothing yet
        return 128 + self._stopped_by  # the worker got SIGTERM in place of this signal

    def _close_sockets(self) -> None:
        for descriptors in self._sockets.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._sockets = {}


class WorkerProcess:
    """A server process that was started.

    Attributes:
        pid: its process id.
        ready_file: becomes readable when the worker is ready or has ended.
        ready_s: when it became ready, on time.monotonic()'s clock; None before.
        code: how it ended: an exit code, or a negative signal number; None before.
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
        """Seconds since it became ready; None if it never did."""
        return None if self.ready_s is None else time.monotonic() - self.ready_s

    def send(self, name: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, name)

    def read_ready(self) -> None:
        """Update `ready_s`; to be called when `ready_file` is readable."""
        if self.ready_file is not None:
            with contextlib.suppress(BlockingIOError):  # the worker has ended, and a child of it holds the other end
                if os.read(self.ready_file, 1):
                    self.ready_s = time.monotonic()
            os.close(self.ready_file)
            self.ready_file = None

    def reap(self) -> None:
        """Update `code`, and reap every other child: process 1 of a container inherits orphans."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.code = os.waitstatus_to_exitcode(status)
                    self.read_ready()

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.code = -signal.SIGKILL


def start_worker(command: Sequence[str], sockets: Sockets, lifeline: int, restarts: int) -> WorkerProcess:
    """Start a worker that inherits these descriptors. A worker that cannot be started counts as ended."""
    try:
        ready_file, ready = os.pipe()
    except OSError as error:  # too many open files
        logger.error("the worker cannot be started: %s", error.strerror)  # noqa: TRY400  (the line says it all)
        return WorkerProcess(0, None, NOT_STARTED_CODE)
    os.set_blocking(ready_file, False)
    os.set_inheritable(ready, True)
    environment = {**os.environ, VARIABLE: Handover(sockets, lifeline, ready, restarts).to_text()}
    try:
        # In a process group of its own: Ctrl-C in a terminal is for the supervisor, which passes it on once.
        pid = os.posix_spawn(command[0], list(command), environment, setpgroup=0, setsigdef=[signal.SIGPIPE])
    except OSError as error:  # too many processes, or the interpreter is being replaced
        logger.error("the worker cannot be started: %s: %s", command[0], error.strerror)  # noqa: TRY400  (the line says it all)
        os.close(ready_file)
        return WorkerProcess(0, None, NOT_STARTED_CODE)
    finally:
        os.close(ready)
    return WorkerProcess(pid, ready_file)


class Backoff:
    """Waits between restarts: none before the first, then doubling, until a worker has served for a minute.

    Attributes:
        never_ready: how many workers in a row have ended before they were ready.
    """

    def __init__(self) -> None:
        self._wait_s = 0.0
        self.never_ready = 0

    def ended(self, served_s: float | None) -> float:
        """Seconds until the next start, after a worker that was ready for `served_s` seconds, or None if it never was."""
        self.never_ready = self.never_ready + 1 if served_s is None else 0
        if served_s is not None and served_s >= FORGET_AFTER_S:
            self._wait_s = 0.0
        wait_s = self._wait_s
        self._wait_s = min(max(FIRST_S, 2 * wait_s), LONGEST_S)
        return wait_s


class SignalReader:
    """Waits for signals and files at the same time."""

    def __init__(self, read: int) -> None:
        self._read = read

    def wait(self, files: Sequence[int], timeout_s: float | None) -> tuple[list[signal.Signals], list[int]]:
        """The signals received and the readable descriptors of `files`; both empty after the timeout. None waits forever."""
        readable, _, _ = select.select([self._read, *files], [], [], timeout_s)
        received: list[signal.Signals] = []
        if self._read in readable:
            readable.remove(self._read)
            received = [signal.Signals(number) for number in os.read(self._read, 4096)]
        return received, readable


@contextlib.contextmanager
def signal_reader(names: Iterable[signal.Signals]) -> Iterator[SignalReader]:
    """Handle and unblock these signals inside the context."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    # A full pipe holds thousands of unread signals, so a signal that does not fit adds nothing.
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # With a handler, even an empty one, the interpreter writes the signal's number to the pipe.
    handlers = {name: signal.signal(name, lambda *_: None) for name in names}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    try:
        yield SignalReader(read)
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def _pause(signals: SignalReader, wait_s: float) -> bool:
    """Wait before the next start; False if a stop signal comes."""
    until_s = time.monotonic() + wait_s
    while (left_s := until_s - time.monotonic()) > 0:
        received, _ = signals.wait([], left_s)
        if any(name in STOPS for name in received):
            return False
    return True


def in_words(code: int) -> str:
    """How a process ended, such as "exit code 3" or "SIGABRT"; negative codes are signals."""
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
    """The exit code that a shell would report."""
    return code if code >= 0 else 128 - code
