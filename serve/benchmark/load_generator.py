"""Closed-loop load: so many requests in flight, each slot sends its next one when its last one is answered.

The load runs in processes of its own, which share no interpreter lock with whoever shows the progress, and sends requests that
were serialized before. An answer counts by its gRPC status and is not decoded.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import signal
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc
import numpy as np

from serve.benchmark.errors import BenchmarkError
from serve.client.channel import channel_options, method_path

if TYPE_CHECKING:
    from types import TracebackType

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Order:
    """One load to generate.

    Attributes:
        concurrency: requests in flight.
        seconds: no request is started after this time; None for no such limit.
        requests: no more than so many are started; None for no such limit.
        timeout_s: the deadline of each request.
    """

    concurrency: int
    seconds: float | None
    requests: int | None
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a load did: every request that was started is either in `latencies_ns` or in `errors`.

    Attributes:
        latencies_ns: int64 [answered], from sending to the answer, of the requests that succeeded.
        errors: failed requests by gRPC status name.
        messages: the first server message of each of these statuses.
        seconds: from the first request's start to the last one's end.
    """

    latencies_ns: np.ndarray[Any, np.dtype[np.int64]]
    errors: Counter[str]
    messages: dict[str, str]
    seconds: float


class LoadGenerator:
    """Processes that are connected to one server and wait for orders.

    The processes are spawned: a script that uses this needs the usual `if __name__ == "__main__":`.

    Args:
        address: HOST:PORT of the server.
        requests: serialized ModelInferRequests, sent in turn.
        processes: how many share the load; one drives some ten thousand requests a second.
    """

    def __init__(self, address: str, requests: Sequence[bytes], *, processes: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, address, list(requests)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, order: Order) -> Outcome:
        """Generate one load and wait for its end.

        Raises:
            BenchmarkError: a process has died.
        """
        shares = [(pipe, share) for pipe, share in zip(self._pipes, _shares(order, len(self._pipes)), strict=True) if share]
        try:
            # Every process says that it has its order before any of them starts, so that they load the server together.
            for pipe, share in shares:
                pipe.send(share)
            for pipe, _ in shares:
                pipe.recv()
            for pipe, _ in shares:
                pipe.send("start")
            return _together([pipe.recv() for pipe, _ in shares])
        except (EOFError, OSError):
            raise BenchmarkError("a process of the load generator has died; was it killed for want of memory?") from None

    def close(self) -> None:
        """End the processes, and with them whatever is in flight."""
        for process in self._processes:
            process.terminate()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _shares(order: Order, processes: int) -> list[Order | None]:
    """Divide an order evenly; None for a process that gets nothing to do."""
    shares: list[Order | None] = []
    for index in range(processes):
        concurrency = _part(order.concurrency, index, processes)
        requests = None if order.requests is None else _part(order.requests, index, min(processes, order.concurrency))
        some = Order(concurrency=concurrency, seconds=order.seconds, requests=requests, timeout_s=order.timeout_s)
        shares.append(some if concurrency else None)
    return shares


def _part(total: int, index: int, parts: int) -> int:
    return total // parts + (index < total % parts)


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    messages: dict[str, str] = {}
    for outcome in outcomes:
        messages = outcome.messages | messages
    return Outcome(
        latencies_ns=np.concatenate([outcome.latencies_ns for outcome in outcomes]),
        errors=sum((outcome.errors for outcome in outcomes), Counter()),
        messages=messages,
        seconds=max(outcome.seconds for outcome in outcomes),
    )


def _work(pipe: Any, address: str, requests: list[bytes]) -> None:
    """A process's life: orders in, outcomes out, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        connection = runner.run(_connect(address))
        while True:
            try:
                order = pipe.recv()
                pipe.send("ready")
                pipe.recv()
                pipe.send(runner.run(_generate(connection, requests, order)))
            except EOFError:
                return


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop  # noqa: PLC0415  (uvloop does not exist for Windows)

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _connect(address: str) -> Any:
    # Without serializers, so that bytes go out and come in as they are.
    return grpc.aio.insecure_channel(address, options=channel_options()).unary_unary(method_path("ModelInfer"))


@dataclass
class _Tally:
    latencies_ns: array[int] = field(default_factory=lambda: array("q"))
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)


async def _generate(rpc: Any, requests: Sequence[bytes], order: Order) -> Outcome:
    tally = _Tally()
    started_ns = time.monotonic_ns()
    end_ns = None if order.seconds is None else started_ns + round(order.seconds * NANOSECONDS)
    source = itertools.islice(itertools.cycle(requests), order.requests)
    await asyncio.gather(*(_slot(rpc, source, end_ns, order.timeout_s, tally) for _ in range(order.concurrency)))
    return Outcome(
        latencies_ns=np.frombuffer(tally.latencies_ns, np.int64),
        errors=tally.errors,
        messages=tally.messages,
        seconds=(time.monotonic_ns() - started_ns) / NANOSECONDS,
    )


async def _slot(rpc: Any, source: Iterator[bytes], end_ns: int | None, timeout_s: float, tally: _Tally) -> None:
    clock, record = time.monotonic_ns, tally.latencies_ns.append
    for request in source:
        start_ns = clock()
        if end_ns is not None and start_ns >= end_ns:
            return
        try:
            await rpc(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            tally.errors[code] += 1
            tally.messages.setdefault(code, error.details() or "no explanation")
        else:
            record(clock() - start_ns)
