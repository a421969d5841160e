"""Client-side results in windows of equal length, some with a reload and some without, and their medians with an interval."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from halfserve.serve.benchmark.load.load_generator import LoadGenerator
from halfserve.serve.benchmark.load.spec import LatencyHistogram, LoadSpec, LoadStatistics

CONFIDENCE = 0.95
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
BEGIN = 0.1  # fraction of a window that passes before the reload


@dataclass(frozen=True, kw_only=True)
class Median:
    """The median of some values, and the bounds of the true median with 95 % confidence."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float]) -> Median:
    """The median, with the interval between two of the values that follows from the sign test.

    Each value is above the true median with probability 1/2, so the number of values above it is binomial (W. J. Conover,
    Practical Nonparametric Statistics, section 3.2). Fewer than six values give no 95 % interval; it then spans all values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the median of no values was asked for, expected one at least")
    ordered = sorted(values)
    count, middle = len(ordered), len(ordered) // 2
    value = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    rank, below = 0, 0.5**count  # the probability that at most `rank` values are below the true median
    while 2 * below <= 1 - CONFIDENCE:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    outside = max(0, rank - 1)
    return Median(value=value, low=ordered[outside], high=ordered[count - 1 - outside])


@dataclass
class Windows:
    """Windows of one kind.

    Attributes:
        tallies: results of each window, in order.
        loading_s: duration of each reload in seconds; empty for quiet windows.
    """

    tallies: list[LoadStatistics] = field(default_factory=list)
    loading_s: list[float] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return sum(tally.failed for tally in self.tallies)

    @property
    def requests(self) -> int:
        """Requests that were answered."""
        return sum(tally.latency.total for tally in self.tallies)

    def of_each(self, percentile: float) -> list[float]:
        """A percentile of each window's latencies, in milliseconds."""
        return [tally.latency.percentiles_ms([percentile])[0] for tally in self.tallies]

    def together(self) -> list[float]:
        """PERCENTILES of the latencies of all windows together, in milliseconds."""
        return LatencyHistogram.merged(tally.latency for tally in self.tallies).percentiles_ms(PERCENTILES)


def compare(quiet: Windows, reload: Windows, percentile: float) -> Median:
    """Increase of a percentile in windows with a reload over the neighbouring quiet ones, in percent."""
    pairs = zip(quiet.of_each(percentile), reload.of_each(percentile), strict=True)
    return median_of([100 * (with_reload / without - 1) for without, with_reload in pairs])


def measure(
    generator: LoadGenerator, order: LoadSpec, pairs: int, *, add: Callable[[], None], load: Callable[[], None]
) -> tuple[Windows, Windows]:
    """Measure windows without and with a reload in turn, so that slow changes affect both.

    Args:
        generator: load generator.
        order: load of each window.
        pairs: number of pairs of windows.
        add: provides the next version, outside of the windows.
        load: has the model replaced; returns once it is.
    """
    quiet, reload = Windows(), Windows()
    for _ in range(pairs):
        add()
        quiet.tallies.append(generator.run(order).tally)
        _with_reload(generator, order, load, reload)
    return quiet, reload


def _with_reload(generator: LoadGenerator, order: LoadSpec, load: Callable[[], None], windows: Windows) -> None:
    trouble: list[BaseException] = []

    def work() -> None:
        time.sleep(BEGIN * (order.seconds or 0.0))
        started = time.perf_counter()
        try:
            load()
        except BaseException as error:  # noqa: BLE001  (raised below, where somebody sees it)
            trouble.append(error)
        windows.loading_s.append(time.perf_counter() - started)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        windows.tallies.append(generator.run(order).tally)
    finally:
        thread.join()
    if trouble:
        raise trouble[0]
