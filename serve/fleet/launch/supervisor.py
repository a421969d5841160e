"""The supervisor: starts workers, and replaces a worker that ends. Imports only the standard library.

`supervision` runs it as a program: python -m halfserve.serve.fleet.launch.supervisor PLAN COMMAND ...
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from halfserve.serve.fleet.agent.worker_process import WorkerProcess, exit_code, in_words, reap, start_worker
from halfserve.serve.fleet.member.handover import GONE, ConnectionCounts, Handover, SupervisorPlan
from halfserve.serve.log_handler import LineFormat, log_to_standard_error

logger = logging.getLogger("halfserve.serve.fleet.launch.supervisor")  # as a program, this module has another name

STOPS = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = signal.SIGHUP
FIRST_S, LONGEST_S = 0.1, 10.0
FORGET_AFTER_S = 60.0


class WorkerSlot:
    """Slot for one worker at a time.

    Attributes:
        number: number of the slot, counted from 1.
        restarts: number of earlier workers, not counting the current or next one.
        worker: current worker; None before the start and between two workers.
        due_s: time of the next start on time.monotonic()'s clock.
        backoff: determines the delay before the next start.
    """

    def __init__(self, number: int, title: str) -> None:
        """Create a slot without a worker; `title` names the worker in the log."""
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

    Of several, the first must be ready before the others start: if it cannot serve, none can. A first start that fails ends the
    supervisor with the reason. Once all workers have served, it restarts them without end, so that the server comes back when
    the cause of the failures is gone.
    """

    def __init__(self, plan: SupervisorPlan, command: Sequence[str]) -> None:
        """Create a supervisor without workers; `command` starts one, and its first word is the path of a program."""
        self._plan = plan
        self._sockets = dict(plan.sockets)
        self._command = command
        count = plan.processes
        self._places = [WorkerSlot(n, "the worker" if count == 1 else f"worker {n} of {count}") for n in range(1, count + 1)]
        self._counts = ConnectionCounts(Path(plan.folder)) if plan.folder else None
        self._stopped_by: signal.Signals | None = None
        self._forced_by: signal.Signals | None = None
        self._has_served = False  # whether all workers were ready at the same time
        self._code: int | None = None  # exit code of the supervisor, once known
        # Never written to: a worker notices the end of this process by the end of the pipe.
        self._lifeline, self._held = os.pipe()
        os.set_inheritable(self._lifeline, True)

    def run(self) -> int:
        """Supervise until a signal, or until the first start fails; returns the exit code."""
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
        """Return whether a stop has begun and no worker is left."""
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

    def _startable(self) -> list[WorkerSlot]:
        """Return the first slot, and all slots once a worker has been ready."""
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

    def _ended(self, place: WorkerSlot, worker: WorkerProcess) -> None:
        """Replace a worker that has ended, or give up a first start that fails."""
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


class Backoff:
    """Delays between restarts: none before the first, then doubling up to LONGEST_S, until a worker has served for a minute."""

    def __init__(self) -> None:
        self._wait_s = 0.0

    def ended(self, served_s: float | None) -> float:
        """Seconds until the next start, after a worker that was ready for `served_s` seconds, or None if it never was."""
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


def main(text: str, *command: str) -> int:
    """Supervise until the end; returns the exit code."""
    plan = SupervisorPlan.from_text(text)
    log_to_standard_error(LineFormat(plan.line_format))
    logging.raiseExceptions = False  # a closed standard error must not end the supervisor
    try:
        return Supervisor(plan, command).run()
    finally:
        if plan.socket_path is not None:
            Path(plan.socket_path).unlink(missing_ok=True)
        if plan.folder:
            shutil.rmtree(plan.folder, ignore_errors=True)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    logging.shutdown()
    os._exit(code)
