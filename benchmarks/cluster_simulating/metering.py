"""The processor time of a controller whose members are simulated in the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, Generic, TypeVar, TypeVarTuple

from benchmarks.cluster_simulating.virtual_time import VirtualLoop
from halfserve.serve.fleet.control.controller import Controller
from halfserve.serve.fleet.control.reports import Orders, Report

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Meter:
    """Measures the processor time of a part of this process that never waits.

    It reads the wall clock, as reading the processor's clock may take 0.1 ms, and scales by the process's share of a processor
    in that time.
    """

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._began = time.perf_counter(), time.process_time()

    def take(self) -> float:
        """Processor seconds since the last call."""
        spent, self._spent_s = self._spent_s, 0.0
        before, self._began = self._began, (time.perf_counter(), time.process_time())
        return spent * (self._began[1] - before[1]) / (self._began[0] - before[0])

    def run(self, function: Callable[[], T]) -> T:
        """Call a function, and count its time."""
        began = time.perf_counter()
        try:
            return function()
        finally:
            self._spent_s += time.perf_counter() - began


class MeteredLoop(VirtualLoop):
    """Meters the controller's timers, and its work on threads."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if getattr(callback, "__module__", "").startswith("halfserve.serve.fleet"):
            return super().call_at(when, lambda: self._meter.run(lambda: callback(*args)), context=context)
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        return super().run_in_executor(executor, lambda: self._meter.run(lambda: func(*args)))


class MeteredLink:
    """A link to a controller with every step metered."""

    def __init__(self, controller: Controller, meter: Meter) -> None:
        self._controller = controller
        self._meter = meter

    async def exchange(self, report: Report) -> Orders:
        return await _Metered(self._controller.exchange(report), self._meter)

    async def call(self, path: str, request: bytes) -> bytes:
        return await _Metered(self._controller.call(path, request), self._meter)

    async def metrics(self) -> tuple[bytes, str]:
        return await _Metered(self._controller.metrics(), self._meter)


class _Metered(Awaitable[T], Generic[T]):
    def __init__(self, work: Coroutine[Any, Any, T], meter: Meter) -> None:
        self._work = work
        self._meter = meter

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731  (replaced below)
        while True:
            try:
                waits_for = self._meter.run(step)
            except StopIteration as ended:
                value: T = ended.value
                return value
            try:
                yield waits_for
                step = lambda: self._work.send(None)  # noqa: E731  (as above)
            except BaseException as error:  # noqa: BLE001  (handed on: a cancellation, most of all)
                raised = error
                step = lambda: self._work.throw(raised)  # noqa: B023, E731  (as above)
