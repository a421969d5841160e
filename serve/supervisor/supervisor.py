"""The supervisor's loop: one worker at a time, another one when it ends."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence

from serve.supervisor.backoff import Backoff
from serve.supervisor.endings import exit_code, in_words
from serve.supervisor.handover import Plan
from serve.supervisor.wakeups import Wakeups, wakeups
from serve.supervisor.worker_process import WorkerProcess, start_worker

logger = logging.getLogger(__name__)

STOPS = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = signal.SIGHUP


class Supervisor:
    """Keeps a worker alive behind sockets that stay open while none is there."""

    def __init__(self, plan: Plan, command: Sequence[str]) -> None:
        """A supervisor that has started nothing yet.

        Args:
            plan: its sockets, and what goes with them.
            command: starts a worker; its first word is the path of a program.
        """
        self._sockets = dict(plan.sockets)
        self._command = command
        self._backoff = Backoff()
        self._stopped_by: signal.Signals | None = None
        self._forced_by: signal.Signals | None = None
        self._has_served = False
        # Nobody writes to it: the worker sees that this process has ended by the pipe's end.
        self._lifeline, self._held = os.pipe()
        os.set_inheritable(self._lifeline, True)

    def run(self) -> int:
        """Until a signal, or until it makes no sense to go on; the exit code."""
        try:
            with wakeups([*STOPS, PASSED_ON, signal.SIGCHLD]) as signals:
                return self._keep_alive(signals)
        finally:
            self._close_sockets()
            os.close(self._lifeline)
            os.close(self._held)

    def _keep_alive(self, signals: Wakeups) -> int:
        restarts = 0
        while True:
            worker = start_worker(self._command, self._sockets, self._lifeline, restarts)
            code = self._attend(worker, signals)
            if self._stopped_by is not None:
                return self._code_of_stop(worker, code)
            self._has_served |= worker.ready_s is not None
            if not self._has_served:
                return _never_served(code)
            wait_s = self._backoff.ended(worker.served_s)
            if self._backoff.gives_up:
                return _given_up(self._backoff.never_ready, code)
            _tell_end(worker, code, wait_s)
            if not _pause(signals, wait_s):
                return 0
            restarts += 1

    def _attend(self, worker: WorkerProcess, signals: Wakeups) -> int:
        """Wait for a worker's end and pass signals on; how it ended."""
        while worker.code is None:
            came, readable = signals.wait([] if worker.ready_file is None else [worker.ready_file], None)
            if readable:
                worker.look()
            worker.reap()
            for name in set(came):
                if name in STOPS:
                    self._stop(name, worker)
                elif name == PASSED_ON and worker.ready_s is not None:  # before, it reads its files anyway
                    worker.send(name)
        return worker.code

    def _stop(self, name: signal.Signals, worker: WorkerProcess) -> None:
        if self._stopped_by is not None:
            self._forced_by = name
            worker.kill()
            return
        self._stopped_by = name
        worker.send(signal.SIGTERM)  # whichever it was: a worker that still starts would answer SIGINT with a stack trace
        self._close_sockets()  # or clients could go on connecting while the worker leaves

    def _code_of_stop(self, worker: WorkerProcess, code: int) -> int:
        if self._forced_by is not None:
            return 128 + self._forced_by
        if code != -signal.SIGTERM or self._stopped_by is None:
            return exit_code(code)
        if worker.ready_s is None and self._has_served:
            return 0  # it was the next one, and had taken nothing yet
        return 128 + self._stopped_by  # in whose place it was sent

    def _close_sockets(self) -> None:
        for descriptors in self._sockets.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._sockets = {}


def _pause(signals: Wakeups, wait_s: float) -> bool:
    """Wait until it is time for the next start; False if a signal comes that ends it all."""
    until = time.monotonic() + wait_s
    while (left_s := until - time.monotonic()) > 0:
        came, _ = signals.wait([], left_s)
        if any(name in STOPS for name in came):
            return False
    return True


def _never_served(code: int) -> int:
    """The worker has said what is wrong, unless it could not."""
    if code < 0:
        logger.error("the server ended before it was ready: %s", in_words(code))
    return exit_code(code)


def _given_up(times: int, code: int) -> int:
    logger.error("the worker ended %d times in a row before it was ready, at last with %s; giving up", times, in_words(code))
    return exit_code(code)


def _tell_end(worker: WorkerProcess, code: int, wait_s: float) -> None:
    after = "before it was ready" if worker.served_s is None else f"after {worker.lived_s:.1f} s"
    when = f"in {wait_s:g} s" if wait_s else "now"
    logger.warning("the worker (process %d) ended %s: %s; the next one starts %s", worker.pid, after, in_words(code), when)
