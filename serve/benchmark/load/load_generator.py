"""Processes that generate load, and the one that tells them what to do."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Self

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.load.load_process import DONE, work
from serve.benchmark.load.order import INTERRUPTED, Order, Outcome, Tally, Target
from serve.benchmark.load.start import undisturbed

if TYPE_CHECKING:
    from types import TracebackType

DIED = "a process of the load generator has died; was it killed for want of memory?"

OnWindow = Callable[[Tally], bool]


class LoadGenerator:
    """Processes that wait for orders to load one server.

    The processes are spawned: a script that uses this needs the usual `if __name__ == "__main__":`.

    Args:
        target: whom to load, and over which RPC.
        requests: serialized ModelInferRequests, sent in turn.
        models: for each of them, the number of the model it is for; None when there is one model.
        processes: how many share the load; one drives some ten thousand requests a second.
    """

    def __init__(
        self, target: Target, requests: Sequence[bytes], *, models: Sequence[int] | None = None, processes: int = 1
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

    def run(self, order: Order, on_window: OnWindow = lambda _: True) -> Outcome:
        """Generate one load and wait for its end.

        A KeyboardInterrupt while it runs ends the load; what was measured until then is in the outcome.

        Args:
            order: what to do.
            on_window: called with each window's tally of all processes together; False ends the load.

        Raises:
            BenchmarkError: a process has died.
        """
        pairs = list(zip(self._pipes, _shares(order, len(self._pipes)), strict=True))
        shares = [(pipe, share) for pipe, share in pairs if share is not None]
        try:
            # Every process says that it is connected before any of them starts, so that they load the server together.
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
        """End the processes, and with them whatever is in flight."""
        for process in self._processes:
            process.kill()  # a load that is under way does not heed SIGTERM
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Collection:
    """Puts what the processes tell of one load together."""

    def __init__(self, pipes: Sequence[Any], on_window: OnWindow) -> None:
        self._on_window = on_window
        self._told: dict[Any, list[Tally]] = {pipe: [] for pipe in pipes}
        self._endings: dict[Any, str | None] = {}
        self._windows: list[Tally] = []

    def outcome(self) -> Outcome:
        """Everything, when all processes are done."""
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
        return Outcome(
            tally=totals[0].beside(totals[1:]),
            windows=self._windows,
            ended_early=INTERRUPTED if interrupted else trouble,
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


def _shares(order: Order, processes: int) -> list[Order | None]:
    """Divide an order evenly; None for a process that gets nothing to do."""
    if order.rate is not None:
        return [_open_share(order, index, processes) for index in range(processes)]
    concurrency = order.concurrency or 1
    used = min(processes, concurrency)
    return [
        replace(
            order,
            concurrency=_part(concurrency, index, used),
            requests=None if order.requests is None else _part(order.requests, index, used),
            connections=max(1, _part(order.connections, index, used)),
            share=(index, used),
        )
        if index < used
        else None
        for index in range(processes)
    ]


def _open_share(order: Order, index: int, processes: int) -> Order:
    requests = None if order.requests is None else _part(order.requests, index, processes)
    connections = max(1, _part(order.connections, index, processes))
    return replace(order, requests=requests, connections=connections, share=(index, processes))


def _part(total: int, index: int, parts: int) -> int:
    return total // parts + (index < total % parts)
