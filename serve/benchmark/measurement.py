"""Measure one load on one server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.level import Level
from serve.benchmark.load.load_generator import LoadGenerator
from serve.benchmark.load.order import INTERRUPTED, Arrivals, Order, Tally
from serve.benchmark.loads import Load
from serve.benchmark.stability import MAX_WINDOWS, WINDOWS, is_stable
from serve.client import InferenceClientError

if TYPE_CHECKING:
    from serve.benchmark.server_statistics import ServerTotals

ReadTotals = Callable[[], "ServerTotals | None"]
OnWindow = Callable[[Tally], None]

NEARLY = 0.99  # slices end a little before or after their time


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How loads are measured.

    Attributes:
        seconds: length of a load, or of one window of it when `until_stable`; None to let `requests` end it.
        requests: of a load; None to let `seconds` end it.
        until_stable: go on, window by window, until three agree.
        warmup_s: unmeasured load before.
        timeout_s: the deadline of each request.
        arrivals: how the requests of a rate follow each other.
        connections: to the server, from all processes together.
        percent: the latency percentile that has to be stable.
        goodput_ms: the latency up to which an answer is of use; None for any.
    """

    seconds: float | None = 2.0
    requests: int | None = None
    until_stable: bool = False
    warmup_s: float = 0.5
    timeout_s: float = 30.0
    arrivals: Arrivals = "poisson"
    connections: int = 1
    percent: float = 99.0
    goodput_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a measurement needs of the server under it.

    Attributes:
        generator: has the requests and is connected to the server.
        read_totals: asks the server for its counters; None from one that keeps none.
        batch_size: rows per request.
        models: the names of the models that the requests are for.
    """

    generator: LoadGenerator
    read_totals: ReadTotals
    batch_size: int
    models: tuple[str, ...]


def measure(bench: Bench, load: Load, how: Measurement, on_window: OnWindow = lambda _: None) -> Level:
    """Load the server and say what it did.

    Args:
        bench: the server and its load generator.
        load: what to do.
        how: for how long, and so on.
        on_window: called several times a second with what has been measured since the last time.

    Raises:
        BenchmarkError: no request succeeded, the server went away in the warm-up, or a load generator's process died.
        KeyboardInterrupt: somebody pressed Ctrl-C in the warm-up; during the measurement it ends early instead.
    """
    order = Order(
        concurrency=load.concurrency,
        rate=load.rate,
        arrivals=how.arrivals,
        seconds=how.seconds,
        requests=how.requests,
        timeout_s=how.timeout_s,
        connections=how.connections,
    )
    if how.warmup_s > 0:
        warm = bench.generator.run(replace(order, seconds=how.warmup_s, requests=None))
        if warm.ended_early == INTERRUPTED:
            raise KeyboardInterrupt
        if warm.ended_early is not None:
            raise BenchmarkError(f"the server has gone in the warm-up of {load.text}: {warm.ended_early}")
    if how.until_stable:
        return _until_stable(bench, load, how, order, on_window)
    # The counters are read while nothing is in flight, so they cover exactly the requests that are measured.
    before = _totals(bench)
    outcome = bench.generator.run(order, lambda tally: _shown(tally, on_window))
    after = None if outcome.ended_early else _totals(bench)
    server = after.since(before) if before and after else None
    return _level(bench, load, how, outcome.tally, server=server, windows=outcome.windows, ended_early=outcome.ended_early)


class _Windows:
    """Slices of a load put together into windows, with the server's counters at their edges."""

    def __init__(self, bench: Bench, how: Measurement) -> None:
        self._bench = bench
        self._how = how
        self._slices: list[Tally] = []
        self.windows: list[Tally] = []
        self.totals = [_totals(bench)]

    @property
    def stable(self) -> bool:
        """Whether the last windows agree."""
        return is_stable(self.windows, self._how.percent)

    @property
    def enough(self) -> bool:
        """Whether there is nothing more to be measured."""
        return self.stable or len(self.windows) >= MAX_WINDOWS

    def take(self, part: Tally) -> None:
        """The next slice; what comes after the decision is not part of the measurement."""
        if self.enough:
            return
        self._slices.append(part)
        if sum(one.seconds for one in self._slices) >= (self._how.seconds or 0.0) * NEARLY:
            self.windows.append(self._slices[0].then(self._slices[1:]))
            self._slices = []
            self.totals.append(_totals(self._bench))


def _until_stable(bench: Bench, load: Load, how: Measurement, order: Order, on_window: OnWindow) -> Level:
    found = _Windows(bench, how)

    def go_on(part: Tally) -> bool:
        on_window(part)
        found.take(part)
        return not found.enough

    # Slices are shorter than windows, because a load ends, and is seen to go on, at the end of a slice.
    slice_s = min(order.window_s, how.seconds or order.window_s)
    outcome = bench.generator.run(replace(order, seconds=None, requests=None, window_s=slice_s), go_on)
    last = found.windows[-WINDOWS:]
    first, end = found.totals[-1 - len(last)], found.totals[-1]
    return _level(
        bench,
        load,
        how,
        last[0].then(last[1:]) if last else outcome.tally,
        server=end.since(first) if first and end and last else None,
        windows=found.windows or outcome.windows,
        stable=found.stable,
        ended_early=outcome.ended_early,
    )


def _totals(bench: Bench) -> ServerTotals | None:
    """The counters; a measurement without them is still one, such as that of a server that is too busy to tell."""
    try:
        return bench.read_totals()
    except InferenceClientError:
        return None


def _level(
    bench: Bench,
    load: Load,
    how: Measurement,
    tally: Tally,
    *,
    server: ServerTotals | None,
    windows: Sequence[Tally],
    stable: bool | None = None,
    ended_early: str | None = None,
) -> Level:
    return Level.of(
        tally,
        server,
        load=load,
        batch_size=bench.batch_size,
        models=bench.models,
        windows=windows,
        goodput_ms=how.goodput_ms,
        stable=stable,
        ended_early=ended_early,
    )


def _shown(tally: Tally, on_window: OnWindow) -> bool:
    on_window(tally)
    return True
