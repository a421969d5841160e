"""Measures one load on one server, for a fixed time or until three windows agree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.level import Level, Load, ServerTotals
from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import INTERRUPTED, Arrivals, LoadSpec, LoadStatistics
from halfserve.serve.client.errors import ClientError

WINDOWS = 3
TOLERANCE = 0.1
MAX_WINDOWS = 10
ReadTotals = Callable[[], ServerTotals | None]
OnWindow = Callable[[LoadStatistics], None]
Measure = Callable[[Load], Level]
RESOLUTION = 0.05  # relative resolution of a rate; concurrencies are searched exactly
MAX_DOUBLINGS = 20
ATTEMPTS = 2
NEARLY = 0.99  # slices may end slightly before or after their time


def is_stable(windows: Sequence[LoadStatistics], percent: float) -> bool:
    """Return whether throughput and latency (at `percent`) of the last three windows are each within 10 % of their mean."""
    last = windows[-WINDOWS:]
    if len(last) < WINDOWS or not all(window.latency.total for window in last):
        return False
    rates = [window.latency.total / window.seconds for window in last]
    latencies_ms = [window.latency.percentiles_ms([percent])[0] for window in last]
    return _agree(rates) and _agree(latencies_ms)


def _agree(values: Sequence[float]) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= TOLERANCE * mean for value in values)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    seconds: float | None = 2.0  # length of a load, or of one window if `until_stable`; None if `requests` limits it
    requests: int | None = None  # number of requests of a load; None if `seconds` limits it
    until_stable: bool = False  # measure further windows until three agree
    warmup_s: float = 0.5  # unmeasured load before the measurement, in seconds
    timeout_s: float = 30.0  # deadline of each request, in seconds
    arrivals: Arrivals = "poisson"  # distribution of the requests of a rate
    connections: int = 1  # connections to the server, over all processes
    percent: float = 99.0  # latency percentile that must be stable
    goodput_ms: float | None = None  # latency limit of a useful answer in milliseconds; None for no limit


@dataclass(frozen=True, kw_only=True)
class Bench:
    generator: LoadGenerator  # load generator with the requests, connected to the server
    read_totals: ReadTotals  # reads the server's counters; returns None if the server keeps none
    batch_size: float  # rows per request; the mean of captured requests
    models: tuple[str, ...]  # names of the models that the requests are for


def measure(bench: Bench, load: Load, how: Measurement, on_window: OnWindow = lambda _: None) -> Level:
    """Load the server and return the results; `on_window` gets the statistics since its last call, several times a second.

    Raises:
        BenchmarkError: no request succeeded, the server stopped during the warm-up, or a load process died.
        KeyboardInterrupt: Ctrl-C during the warm-up; during the measurement, Ctrl-C ends it early instead.
    """
    spec = LoadSpec(
        concurrency=load.concurrency,
        rate=load.rate,
        arrivals=how.arrivals,
        times_s=load.times_s,
        seconds=how.seconds,
        requests=how.requests,
        timeout_s=how.timeout_s,
        connections=how.connections,
    )
    if how.warmup_s > 0:
        warm = bench.generator.run(replace(spec, seconds=how.warmup_s, requests=None, times_s=None))
        if warm.ended_early == INTERRUPTED:
            raise KeyboardInterrupt
        if warm.ended_early is not None:
            raise BenchmarkError(f"the server stopped in the warm-up of {load.text}: {warm.ended_early}")
    if how.until_stable:
        return _until_stable(bench, load, how, spec, on_window)
    # The counters are read while nothing is in flight, so they cover exactly the measured requests.
    before = _totals(bench)
    outcome = bench.generator.run(spec, lambda tally: _shown(tally, on_window))
    after = None if outcome.ended_early else _totals(bench)
    server = after.since(before) if before and after else None
    return _level(bench, load, how, outcome.tally, server=server, windows=outcome.windows, ended_early=outcome.ended_early)


class _Windows:
    """Combines slices of a load into windows, with the server's counters at their edges."""

    def __init__(self, bench: Bench, how: Measurement) -> None:
        self._bench = bench
        self._how = how
        self._slices: list[LoadStatistics] = []
        self.windows: list[LoadStatistics] = []
        self.totals = [_totals(bench)]

    @property
    def stable(self) -> bool:
        return is_stable(self.windows, self._how.percent)

    @property
    def enough(self) -> bool:
        return self.stable or len(self.windows) >= MAX_WINDOWS

    def take(self, part: LoadStatistics) -> None:
        """Add the next slice; slices after the end of the measurement are dropped."""
        if self.enough:
            return
        self._slices.append(part)
        if sum(one.seconds for one in self._slices) >= (self._how.seconds or 0.0) * NEARLY:
            self.windows.append(self._slices[0].then(self._slices[1:]))
            self._slices = []
            self.totals.append(_totals(self._bench))


def _until_stable(bench: Bench, load: Load, how: Measurement, spec: LoadSpec, on_window: OnWindow) -> Level:
    found = _Windows(bench, how)

    def go_on(part: LoadStatistics) -> bool:
        on_window(part)
        found.take(part)
        return not found.enough

    # Slices are at most as long as windows: a load can end, and show progress, only at the end of a slice.
    slice_s = min(spec.window_s, how.seconds or spec.window_s)
    outcome = bench.generator.run(replace(spec, seconds=None, requests=None, window_s=slice_s), go_on)
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
    """Return the counters; None if the server is too busy to answer: the measurement is valid without them."""
    try:
        return bench.read_totals()
    except ClientError:
        return None


def _level(bench: Bench, load: Load, how: Measurement, tally: LoadStatistics, **facts: Any) -> Level:
    return Level(load=load, batch_size=bench.batch_size, tally=tally, models=bench.models, goodput_ms=how.goodput_ms, **facts)


def _shown(tally: LoadStatistics, on_window: OnWindow) -> bool:
    on_window(tally)
    return True


@dataclass(frozen=True, kw_only=True)
class Goal:
    percent: float  # percentage of requests that must be within the limit
    max_ms: float  # latency limit in milliseconds

    def kept_by(self, level: Level) -> bool:
        """Return whether the level meets the goal; it does not if a request failed or the load ended early."""
        return level.failed == 0 and level.ended_early is None and level.percentile_ms(self.percent) <= self.max_ms

    @property
    def text(self) -> str:
        return f"p{self.percent:g} within {self.max_ms:g} ms"


def search(loads: Sequence[Load], goal: Goal, measure: Measure) -> Iterator[Level]:
    """Search for the highest load that meets a goal, from the lowest to the highest of `loads`.

    From a single load, the search doubles it until the goal fails. Then it halves the gap between the highest load that meets
    the goal and the lowest that does not, down to one request in flight or a twentieth of the rate. It yields every level as
    soon as it is measured.

    Raises:
        BenchmarkError: the lowest load does not meet the goal.
    """
    lowest = min(loads, key=lambda load: load.amount)
    highest = max(loads, key=lambda load: load.amount)
    kept = yield from _tried(lowest, goal, measure)
    if not kept:
        raise BenchmarkError(f"even {lowest.text} does not keep {goal.text}")
    good, bad = lowest, None
    limit = highest.amount if len(loads) > 1 else lowest.amount * 2**MAX_DOUBLINGS
    while bad is None and good.amount < limit:
        tried = _scaled(good, min(good.amount * 2, limit))
        kept = yield from _tried(tried, goal, measure)
        good, bad = (tried, None) if kept else (good, tried)
    while bad is not None and _apart(good, bad):
        tried = _scaled(good, (good.amount + bad.amount) / 2)
        kept = yield from _tried(tried, goal, measure)
        good, bad = (tried, bad) if kept else (good, tried)


def _tried(load: Load, goal: Goal, measure: Measure) -> Generator[Level, None, bool]:
    """Return whether a load meets the goal in one of two attempts; a pause of the machine must not count as the server's
    limit.
    """
    for _ in range(ATTEMPTS):
        level = measure(load)
        yield level
        if goal.kept_by(level):
            return True
    return False


def best_of(levels: Sequence[Level], goal: Goal) -> Level | None:
    """Return the level with the highest load that meets the goal; None if none does."""
    keeping = [level for level in levels if goal.kept_by(level)]
    return max(keeping, key=lambda level: level.load.amount, default=None)


def _scaled(load: Load, amount: float) -> Load:
    return Load(concurrency=int(amount)) if load.rate is None else Load(rate=amount)


def _apart(good: Load, bad: Load) -> bool:
    gap = bad.amount - good.amount
    return gap > 1 if good.rate is None else gap > RESOLUTION * good.amount
