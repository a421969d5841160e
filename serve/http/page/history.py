"""What each model did in each of the last seconds, so that a page that is opened now shows what has just been."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.engine.model_statistics import EDGES_NS, Histogram

INTERVAL_S = 1.0
SAMPLES = 300
NO_REQUESTS = Histogram((0,) * (len(EDGES_NS) + 1), 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One interval of one model version.

    Attributes:
        time_s: its end, in seconds since the epoch.
        requests: answered per second.
        failures: failed or refused per second.
        rows: computed per second.
        batch_rows: rows per batch, on average; None where there was no batch.
        median_ms: time that half of the requests took at most, from arrival to answer; None where there were none.
        p99_ms: the same for 99 of 100.
        waiting: requests in the queue at its end.
    """

    time_s: float
    requests: float
    failures: float
    rows: float
    batch_rows: float | None
    median_ms: float | None
    p99_ms: float | None
    waiting: int


WIDTH = len(fields(Sample))


@dataclass(slots=True)
class _Totals:
    """A model's counters at the end of an interval."""

    requests: int = 0
    failures: int = 0
    rows: int = 0
    batches: int = 0
    total: Histogram = NO_REQUESTS


class _Ring:
    """The latest samples, in memory that is taken once.

    As objects they would lie for minutes between those of requests, which last a moment, and keep the memory around them in
    use: for as long as the window is, a server would grow with the time, as if it leaked.
    """

    __slots__ = ("_added", "_numbers")

    def __init__(self) -> None:
        self._numbers = array("d", bytes(8 * WIDTH * SAMPLES))
        self._added = 0

    def add(self, sample: Sample) -> None:
        """Keep one more, in place of the oldest."""
        start = self._added % SAMPLES * WIDTH
        values = (math.nan if value is None else value for value in astuple(sample))
        self._numbers[start : start + WIDTH] = array("d", values)
        self._added += 1

    def since(self, since_s: float) -> list[Sample]:
        """Those that end after a time, oldest first."""
        kept = range(max(0, self._added - SAMPLES), self._added)
        starts = [number % SAMPLES * WIDTH for number in kept]
        return [_from_numbers(self._numbers[at : at + WIDTH]) for at in starts if self._numbers[at] > since_s]


@dataclass(slots=True)
class _Series:
    before: _Totals
    samples: _Ring = field(default_factory=_Ring)


class History:
    """Looks at the counters once a second while it runs. A model that nobody asks costs next to nothing."""

    def __init__(self, core: InferenceCore) -> None:
        self._core = core
        self._series: dict[Model, _Series] = {}
        self._looked = time.monotonic()
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; on the event loop."""
        self._looked = time.monotonic()
        self._next = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def stop(self) -> None:
        """End."""
        if self._next is not None:
            self._next.cancel()

    def of(self, model: Model, since_s: float) -> list[Sample]:
        """The samples of a model that end after a time, oldest first."""
        series = self._series.get(model)
        return [] if series is None else series.samples.since(since_s)

    def look(self) -> None:
        """Add a sample of the time since the last look."""
        now = time.monotonic()
        seconds, self._looked = max(now - self._looked, 1e-3), now
        models = self._core.models()
        self._series = {model: self._series.get(model) or _Series(_totals(model, NO_REQUESTS)) for model in models}
        for model, series in self._series.items():
            totals = _totals(model, series.before.total)
            series.samples.add(_sample(series.before, totals, seconds, model.batcher.waiting))
            series.before = totals

    def _tick(self) -> None:
        self.look()
        self._next = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)


def _totals(model: Model, before: Histogram) -> _Totals:
    s = model.statistics.totals
    total = before if s.success.count == before.count else model.statistics.histograms()["total"]
    return _Totals(s.success.count, s.fail.count, s.rows, s.batches, total)


def _sample(before: _Totals, now: _Totals, seconds: float, waiting: int) -> Sample:
    counts = [n - b for n, b in zip(now.total.counts, before.total.counts, strict=True)]
    batches = now.batches - before.batches
    return Sample(
        time_s=time.time(),
        requests=(now.requests - before.requests) / seconds,
        failures=(now.failures - before.failures) / seconds,
        rows=(now.rows - before.rows) / seconds,
        batch_rows=(now.rows - before.rows) / batches if batches else None,
        median_ms=quantile_ms(counts, 0.5),
        p99_ms=quantile_ms(counts, 0.99),
        waiting=waiting,
    )


def _from_numbers(numbers: Sequence[float]) -> Sample:
    time_s, requests, failures, rows, batch_rows, median_ms, p99_ms, waiting = numbers
    return Sample(
        time_s=time_s,
        requests=requests,
        failures=failures,
        rows=rows,
        batch_rows=None if math.isnan(batch_rows) else batch_rows,
        median_ms=None if math.isnan(median_ms) else median_ms,
        p99_ms=None if math.isnan(p99_ms) else p99_ms,
        waiting=int(waiting),
    )


def quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """The time that `share` of the requests took at most, in milliseconds; None where there are none.

    Args:
        counts: requests per bucket of `EDGES_NS`, and one more beyond.
        share: 0 to 1.

    Within a bucket requests are taken to lie evenly on a logarithmic scale, as its edges do.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= wanted:
            low = EDGES_NS[index - 1] if index else EDGES_NS[0] / 2
            high = EDGES_NS[index] if index < len(EDGES_NS) else EDGES_NS[-1] * 2
            return float(math.exp(math.log(low) + (wanted - seen) / count * math.log(high / low)) / 1e6)
        seen += count
    return None
