"""The supervisor: starts workers, and replaces a worker that ends. Imports only the standard library."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from halfserve.serve.supervisor.connection_counts import GONE, ConnectionCounts
from halfserve.serve.supervisor.handover import LOST_DEVICE_CODE, VARIABLE, Handover, Sockets, SupervisorPlan

logger = logging.getLogger(__name__)

STOPS = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = signal.SIGHUP
NOT_STARTED_CODE = 126  # shells' exit code for a program that cannot be started
FIRST_S, LONGEST_S = 0.1, 10.0
FORGET_AFTER_S = 60.0
GIVE_UP_AFTER = 5
HINTS = {
    signal.SIGKILL: "; out of memory, or by hand",
    signal.SIGSEGV: "; a runtime or a driver crashed",
    signal.SIGABRT: "; a runtime or a driver gave up",
}


class Place:
    """Slot for one worker at a time.

    Attributes:
        number: number of the place, counted from 1.
        restarts: number of earlier workers, not counting the current or next one.
        worker: current worker; None before the start and between two workers.
        due_s: time of the next start on time.monotonic()'s clock.
        backoff: determines the delay before the next start.
    """

    def __init__(self, number: int, title: str) -> None:
        """Create a place without a worker; `title` names the worker in the log."""
        self.number = number
        self.title = title
        self.restarts = 0
        self.worker: WorkerProcess | None = None
        self.due_s = 0.0
        self.backoff = Backoff()

    @property
    def is_ready(self) -> bool:
        return self.worker is not None and self.worker.code is None and self.worker.ready_s is not None


class Supervisor:
    """Keeps workers alive behind sockets that stay open: one worker, or several that accept from the same sockets.

    Of several, the first must be ready before the others start: if it cannot serve, none can.
    """

    def __init__(self, plan: SupervisorPlan, command: Sequence[str]) -> None:
        """Create a supervisor without workers.

        Args:
            plan: sockets and number of workers.
            command: command that starts a worker; its first word is the path of a program.
        """
        self._plan = plan
        self._sockets = dict(plan.sockets)
        self._command = command
        count = plan.processes
        self._places = [Place(n, "the worker" if count == 1 else f"worker {n} of {count}") for n in range(1, count + 1)]
        self._counts = ConnectionCounts(Path(plan.folder)) if plan.folder else None
        self._stopped_by: signal.Signals | None = None
        self._forced_by: signal.Signals | None = None
        self._has_served = False  # whether all workers were ready at the same time
        self._code: int | None = None  # exit code of the supervisor, once known
        # Never written to: a worker notices the end of this process by the end of the pipe.
        self._lifeline, self._held = os.pipe()
        os.set_inheritable(self._lifeline, True)

    def run(self) -> int:
        """Supervise until a signal, or until restarting is pointless; returns the exit code."""
        try:
            with signal_reader([*STOPS, PASSED_ON, signal.SIGCHLD]) as signals:
                self._start_due()
                while not self._is_over():
                    self._look(*signals.wait(self._ready_files(), self._wait_s()))
                    self._start_due()
        finally:
            self._close_sockets()
            os.close(self._lifeline)
            os.close(self._held)
        return self._code or 0

    def _is_over(self) -> bool:
        """Whether a stop has begun and no worker is left."""
        return (self._stopped_by is not None or self._code is not None) and not self._workers()

    def _workers(self) -> list[WorkerProcess]:
        """Workers that have not ended."""
        return [place.worker for place in self._places if place.worker is not None and place.worker.code is None]

    def _ready_files(self) -> list[int]:
        return [worker.ready_file for worker in self._workers() if worker.ready_file is not None]

    def _wait_s(self) -> float | None:
        """Seconds until the next worker is due; None for no limit."""
        if self._stopped_by is not None or self._code is not None:
            return None
        waiting = [place for place in self._startable() if place.worker is None]
        return max(0.0, min(place.due_s for place in waiting) - time.monotonic()) if waiting else None

    def _startable(self) -> list[Place]:
        """The first place, and all places once a worker has been ready."""
        return self._places if self._has_served or any(place.is_ready for place in self._places) else self._places[:1]

    def _start_due(self) -> None:
        if self._stopped_by is not None or self._code is not None:
            return
        now_s = time.monotonic()
        for place in self._startable():
            if place.worker is None and place.due_s <= now_s:
                handover = partial(
                    Handover, place=place.number, places=len(self._places), folder=self._plan.folder, restarts=place.restarts
                )
                place.worker = start_worker(self._command, self._sockets, self._lifeline, handover, place.title)
                if place.worker.code is not None:
                    self._ended(place, place.worker)

    def _look(self, received: Sequence[signal.Signals], readable: Sequence[int]) -> None:
        """Handle signals, workers that became ready, and workers that ended."""
        workers = self._workers()
        for started in workers:
            if started.ready_file in readable:
                started.read_ready()
        reap(workers)
        self._has_served |= all(place.is_ready for place in self._places)
        for place in self._places:
            worker = place.worker
            if worker is not None and worker in workers and worker.code is not None:
                self._ended(place, worker)
        for name in set(received):
            if name in STOPS:
                self._stop(name)
            elif name == PASSED_ON:
                for started in self._workers():
                    if started.ready_s is not None:  # a starting worker reads its files anyway
                        started.send(name)

    def _ended(self, place: Place, worker: WorkerProcess) -> None:
        """Replace a worker that has ended, or give up."""
        code = worker.code or 0
        if self._counts is not None:
            self._counts.set(place.number, GONE)
        if self._stopped_by is not None:
            self._code = self._code or self._code_of_stop(worker, code)
            return
        if self._code is not None:
            return
        # It may have been ready and have ended since the last look.
        self._has_served |= worker.ready_s is not None and all(other.is_ready for other in self._places if other is not place)
        if worker.ready_s is None and not self._has_served:
            if code < 0:  # a worker that exits by itself has logged the reason
                logger.error("%s ended before it was ready: %s", _instead(place.title), in_words(code))
            self._give_up(exit_code(code))
            return
        wait_s = place.backoff.ended(worker.served_s)
        if place.backoff.never_ready >= GIVE_UP_AFTER and not any(other.is_ready for other in self._places):
            times, reason = place.backoff.never_ready, in_words(code)
            logger.error(
                "%s ended %d times in a row before it was ready, at last with %s; giving up", place.title, times, reason
            )
            self._give_up(exit_code(code))
            return
        after = "before it was ready" if worker.served_s is None else f"after {worker.lived_s:.1f} s"
        when = f"in {wait_s:g} s" if wait_s else "now"
        logger.warning(
            "%s (process %d) ended %s: %s; the next one starts %s", place.title, worker.pid, after, in_words(code), when
        )
        place.worker = None
        place.due_s = time.monotonic() + wait_s
        place.restarts += 1

    def _give_up(self, code: int) -> None:
        """End with this code, after the remaining workers."""
        self._code = code
        for worker in self._workers():
            worker.send(signal.SIGTERM)
        self._close_sockets()

    def _stop(self, name: signal.Signals) -> None:
        if self._stopped_by is not None:
            self._forced_by = name
            for worker in self._workers():
                worker.kill()
            self._code = 128 + name
            return
        self._stopped_by = name
        for worker in self._workers():
            worker.send(signal.SIGTERM)  # also for SIGINT, on which a starting worker would print a stack trace
        self._close_sockets()  # otherwise clients could still connect while the workers drain

    def _code_of_stop(self, worker: WorkerProcess, code: int) -> int:
        if code != -signal.SIGTERM or self._stopped_by is None:
            return exit_code(code)
        if worker.ready_s is None and (self._has_served or any(place.restarts for place in self._places)):
            return 0  # a restarted worker that had not accepted anything yet
        return 128 + self._stopped_by  # the worker got SIGTERM instead of this signal

    def _close_sockets(self) -> None:
        for descriptors in self._sockets.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._sockets = {}


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


class Backoff:
    """Delays between restarts: none before the first, then doubling, until a worker has served for a minute.

    Attributes:
        never_ready: number of consecutive workers that ended before they were ready.
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
        """Signals received and readable descriptors among `files`; both empty after the timeout, which None disables."""
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
    # A full pipe holds thousands of unread signals, so a dropped one makes no difference.
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


def _instead(title: str) -> str:
    """Title of a worker for the log; before the server has served, its user knows of no workers."""
    return "the server" if title == "the worker" else title


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
