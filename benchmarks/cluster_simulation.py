"""Processor time of a cluster's controller for 10, 100 and 1,000 simulated members, in deterministic virtual time.

    python -m benchmarks.cluster_simulation [--members 1000] [--models 100]

The controller is that of `halfserve cluster`; its members and their models are simulated in the same process. Each row has the
controller's processor time in milliseconds per second while nothing changes and while one member a second is replaced, and in
milliseconds for the start of all members at once, for one ModelStatistics call, and for one decision on the number of members.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, TypeVarTuple

import typer
from rich.console import Console
from rich.table import Table

from halfserve.serve.fleet.control.autoscaling import MemberLoad, ScalingOptions, wanted_members
from halfserve.serve.fleet.control.controller import Controller
from halfserve.serve.fleet.control.reports import LEASE_S, Orders, Report
from halfserve.serve.protocol.service import SERVICE
from tests.serve.simulated_cluster.members import SimulatedMember, SimulatedStore
from tests.serve.simulated_cluster.virtual_time import VirtualLoop, run_virtually

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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a controller for a number of members."""

    members: int  # number of members
    calm: float  # processor seconds per second while nothing changes
    changing: float  # processor seconds per second while one member a second is replaced
    start: float  # processor seconds until all members, started at once, know each other
    directory: int  # size of one directory in bytes
    statistics: float  # processor seconds of one ModelStatistics call
    policy: float  # processor seconds of one decision on the number of members


def measure(count: int, *, models: int = 10, seconds: float = 10.0) -> Cost:
    """Measure the real controller's processor time, without that of the simulated members.

    Args:
        count: number of members.
        models: number of models in the repository.
        seconds: virtual time of each measured phase, in seconds.
    """
    names = [f"model-{i:03}" for i in range(models)]
    meter = Meter()

    async def main(clock: Callable[[], float]) -> Cost:
        store = SimulatedStore()
        link = MeteredLink(Controller(store, clock), meter)
        members = [SimulatedMember(link, f"{i:04}", names, store) for i in range(count)]
        for member in members:
            member.start()
        await asyncio.sleep(LEASE_S + 10)
        start = meter.take()
        await asyncio.sleep(seconds)
        calm = meter.take() / seconds
        for i in range(round(seconds)):
            await members.pop(0).end()
            members.append(SimulatedMember(link, f"new-{i:04}", names, store))
            members[-1].start()
            await asyncio.sleep(1)
        changing = meter.take() / seconds
        await link.call(f"/{SERVICE}/ModelStatistics", b"")
        statistics = meter.take()
        loads = [MemberLoad()] * count
        meter.run(lambda: wanted_members(loads, count, ScalingOptions(most=count), {}, clock()))
        policy = meter.take()
        directory = members[0].directory
        for member in members:
            await member.kill()
        return Cost(
            members=len(directory.members),
            calm=calm,
            changing=changing,
            start=start,
            directory=directory.ByteSize(),
            statistics=statistics,
            policy=policy,
        )

    return run_virtually(main, lambda: MeteredLoop(meter))


def main(
    members: Annotated[list[int] | None, typer.Option(help="How many; may be given several times.")] = None,
    models: Annotated[int, typer.Option(help="In the repository.")] = 10,
) -> None:
    """Show the controller's cost by number of members."""
    table = Table(
        "members",
        "calm, ms/s",
        "changing, ms/s",
        "start, ms",
        "directory, KiB",
        "statistics, ms",
        "decision, ms",
    )
    for count in members or [10, 100, 1000]:
        cost = measure(count, models=models)
        figures = (cost.calm, cost.changing, cost.start)
        table.add_row(
            f"{cost.members}",
            *(f"{seconds * 1000:.1f}" for seconds in figures),
            f"{cost.directory / 1024:.1f}",
            f"{cost.statistics * 1000:.1f}",
            f"{cost.policy * 1000:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
