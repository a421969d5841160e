"""Load processes, and the parent that starts them and merges their results. Imports neither grpc nor protobuf."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, Self

from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.load.driver import Driver
from halfserve.serve.benchmark.load.spec import INTERRUPTED, LoadEndpoint, LoadResult, LoadSpec, LoadStatistics

ENDINGS = (signal.SIGINT, signal.SIGTERM)
WINDOW, DONE = "window", "done"
DIED = "a process of the load generator has died; was it killed for want of memory?"
OnWindow = Callable[[LoadStatistics], bool]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the block ends, and block Ctrl-C for good in the processes that it starts.

    An interrupted process would print a traceback during its start, while it imports modules or reads its work.
    """
    if sys.platform == "win32":  # processes start differently on Windows, and no signal reaches a whole group
        yield
        return
    resource_tracker.ensure_running()  # if started later, it would unblock the signals
    held: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers and are not interrupted
        # Masking is not enough: another thread receives the signal, and Python raises in the main thread.
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


def work(pipe: Any, target: LoadEndpoint, requests: Sequence[bytes], models: Sequence[int]) -> None:
    """Run a load process until the other end of the pipe is closed; see `Driver` for the arguments.

    The pipe receives a LoadSpec, sends "ready", receives "start" (or "abort"), then sends (WINDOW, LoadStatistics) repeatedly
    and (DONE, reason why the load ended early or None). Meanwhile "stop" ends the sending, and "abort" also the waiting.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    gc.disable()  # a collection would pause the measurement, and nothing here makes reference cycles
    try:
        while True:
            spec = pipe.recv()
            if not isinstance(spec, LoadSpec):
                continue  # a "stop" for a load that had just ended
            driver = Driver(target, requests, models, spec)
            driver.connect()
            pipe.send("ready")
            if pipe.recv() == "start":
                _carry_out(pipe, driver)
            gc.collect()
    except (EOFError, BrokenPipeError):
        return


def _carry_out(pipe: Any, driver: Driver) -> None:
    # `timeout` sends SIGTERM to the whole group; the parent still collects the results.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        trouble = driver.run(lambda tally: _told(pipe, tally))
    except _AbortedError as aborted:
        pipe.send((WINDOW, aborted.tally))
        trouble = None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe.send((DONE, trouble))


class _AbortedError(Exception):
    """The load was aborted; `tally` has the statistics of the last window."""

    def __init__(self, tally: LoadStatistics) -> None:
        super().__init__()
        self.tally = tally


def _told(pipe: Any, tally: LoadStatistics) -> bool:
    if pipe.poll():
        if pipe.recv() == "abort":
            raise _AbortedError(tally)
        pipe.send((WINDOW, tally))
        return False
    pipe.send((WINDOW, tally))
    return True


class LoadGenerator:
    """Processes that generate load on one server; one can send about ten thousand requests a second.

    The processes are spawned, so a script that uses this needs the usual `if __name__ == "__main__":`. See `Driver` for the
    arguments; `models` may be left out if there is one model.
    """

    def __init__(
        self, target: LoadEndpoint, requests: Sequence[bytes], *, models: Sequence[int] | None = None, processes: int = 1
    ) -> None:
        context = multiprocessing.get_context("spawn")
        numbers = [0] * len(requests) if models is None else list(models)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        with undisturbed():
            for _ in range(processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(theirs, target, list(requests), numbers), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def run(self, spec: LoadSpec, on_window: OnWindow = lambda _: True) -> LoadResult:
        """Generate one load and wait for its end; a KeyboardInterrupt ends it early, and the result has the statistics until
        then.

        `on_window` is called with each window's statistics over all processes; returning False ends the load. Raises
        BenchmarkError: a process has died.
        """
        pairs = list(zip(self._pipes, _shares(spec, len(self._pipes)), strict=True))
        shares = [(pipe, share) for pipe, share in pairs if share is not None]
        try:
            # All processes connect before any of them starts, so that they load the server together.
            for pipe, share in shares:
                pipe.send(share)
            for pipe, _ in shares:
                pipe.recv()
            for pipe, _ in shares:
                pipe.send("start")
            return _Collection([pipe for pipe, _ in shares], on_window).outcome()
        except (EOFError, OSError):
            raise BenchmarkError(DIED) from None

    def close(self) -> None:
        """End the processes, and all requests in flight with them."""
        for process in self._processes:
            process.kill()  # a running load ignores SIGTERM
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Collection:
    """Merges the statistics that the processes report of one load."""

    def __init__(self, pipes: Sequence[Any], on_window: OnWindow) -> None:
        self._on_window = on_window
        self._told: dict[Any, list[LoadStatistics]] = {pipe: [] for pipe in pipes}
        self._endings: dict[Any, str | None] = {}
        self._windows: list[LoadStatistics] = []

    def outcome(self) -> LoadResult:
        """Return the merged result, once all processes are done."""
        interrupted = False
        while len(self._endings) < len(self._told):
            try:
                for pipe in wait([pipe for pipe in self._told if pipe not in self._endings]):
                    self._take(pipe)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self._stop("abort")
        totals = [tallies[0].then(tallies[1:]) for tallies in self._told.values()]
        trouble = next((reason for reason in self._endings.values() if reason), None)
        return LoadResult(
            tally=totals[0].beside(totals[1:]), windows=self._windows, ended_early=INTERRUPTED if interrupted else trouble
        )

    def _take(self, pipe: Any) -> None:
        kind, value = pipe.recv()
        if kind == DONE:
            self._endings[pipe] = value
            return
        self._told[pipe].append(value)
        index = len(self._windows)
        if all(len(tallies) > index for tallies in self._told.values()):
            first, *others = (tallies[index] for tallies in self._told.values())
            self._windows.append(first.beside(others))
            if not self._on_window(self._windows[-1]):
                self._stop("stop")

    def _stop(self, word: str) -> None:
        for pipe in self._told:
            if pipe not in self._endings:
                with contextlib.suppress(OSError):
                    pipe.send(word)


def _shares(spec: LoadSpec, processes: int) -> list[LoadSpec | None]:
    """Divide a load evenly; None for a process without a share."""
    concurrency = spec.concurrency or 1
    used = processes if spec.rate is not None else min(processes, concurrency)
    shares = [
        replace(
            spec,
            concurrency=_part(concurrency, index, used) if spec.rate is None else spec.concurrency,
            requests=None if spec.requests is None else _part(spec.requests, index, used),
            connections=max(1, _part(spec.connections, index, used)),
            share=(index, used),
        )
        for index in range(used)
    ]
    return [*shares, *[None] * (processes - used)]


def _part(total: int, index: int, parts: int) -> int:
    return total // parts + (index < total % parts)
