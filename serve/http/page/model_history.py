"""The history of each model over the last minutes, which a newly opened page shows."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import BUCKETS, EDGES_NS, Histogram

INTERVAL_S = 1.0
SAMPLES = 300
SLICE = 30  # samples between two counts of the latencies that are kept
SLICES = SAMPLES // SLICE + 1  # so that the window has all samples, and the latencies of at most SLICE more
NO_REQUESTS = Histogram((0,) * BUCKETS, 0)


class ModelSample(NamedTuple):
    """One interval of one model version."""

    time_s: float  # its end, in seconds since the epoch
    requests: float  # answered per second
    failures: float  # failed or refused per second
    rows: float  # computed per second
    batch_rows: float | None  # mean rows per batch; None without a batch
    median_ms: float | None  # median time from arrival to answer; None without a request
    p99_ms: float | None  # 99th percentile of that time
    waiting: int  # requests in the queue at the end


WIDTH = len(ModelSample._fields)


class _Totals(NamedTuple):
    """A model's counters at the end of an interval."""

    requests: int
    failures: int
    rows: int
    batches: int
    times: Histogram


class _Series:
    """The latest samples of one model, in one array.

    Objects that live for minutes among the short-lived ones of requests would fragment the heap, and make the server grow as if
    it leaked.
    """

    def __init__(self, totals: _Totals) -> None:
        self._totals = totals
        self._numbers = array("d", bytes(8 * WIDTH * SAMPLES))
        self._counts = array("Q", bytes(8 * BUCKETS * SLICES))
        self._added = 0

    def look(self, model: Model, seconds: float) -> None:
        """Add the sample of the last `seconds` in place of the oldest."""
        before, now = self._totals, _totals(model, self._totals.times)
        self._totals = now
        if self._added % SLICE == 0:
            slot = self._added // SLICE % SLICES * BUCKETS
            self._counts[slot : slot + BUCKETS] = array("Q", before.times.counts)
        counts = [n - b for n, b in zip(now.times.counts, before.times.counts, strict=True)]
        batches = now.batches - before.batches
        sample = ModelSample(
            time_s=time.time(),
            requests=(now.requests - before.requests) / seconds,
            failures=(now.failures - before.failures) / seconds,
            rows=(now.rows - before.rows) / seconds,
            batch_rows=(now.rows - before.rows) / batches if batches else None,
            median_ms=quantile_ms(counts, 0.5),
            p99_ms=quantile_ms(counts, 0.99),
            waiting=model.waiting,
        )
        start = self._added % SAMPLES * WIDTH
        self._numbers[start : start + WIDTH] = array("d", (math.nan if value is None else value for value in sample))
        self._added += 1

    def latencies(self) -> list[int]:
        """Return the number of requests of the window by latency, per bucket of `EDGES_NS` and one beyond."""
        first = max(0, (self._added - 1) // SLICE - SLICES + 1) % SLICES * BUCKETS
        return [n - b for n, b in zip(self._totals.times.counts, self._counts[first : first + BUCKETS], strict=True)]

    def since(self, since_s: float) -> list[ModelSample]:
        """Return the samples that end after a time, oldest first."""
        found = []
        for number in range(max(0, self._added - SAMPLES), self._added):
            start = number % SAMPLES * WIDTH
            if self._numbers[start] > since_s:
                values: list[Any] = [None if math.isnan(n) else n for n in self._numbers[start : start + WIDTH]]
                values[-1] = int(values[-1])  # waiting
                found.append(ModelSample(*values))
        return found


class ModelHistory:
    """Samples every model's counters once a second."""

    def __init__(self, core: InferenceCore) -> None:
        self._core = core
        self._series: dict[Model, _Series] = {}
        self._looked = time.monotonic()
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start sampling; on the event loop."""
        self._looked = time.monotonic()
        self._next = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def of(self, model: Model, since_s: float) -> list[ModelSample]:
        """Return the samples of a model that end after a time, oldest first."""
        series = self._series.get(model)
        return [] if series is None else series.since(since_s)

    def latencies(self, model: Model) -> list[int]:
        """Return the number of a model's requests in the last minutes by latency, per bucket of `EDGES_NS` and one beyond."""
        series = self._series.get(model)
        return [0] * BUCKETS if series is None else series.latencies()

    def look(self) -> None:
        """Add a sample of the time since the previous one."""
        now = time.monotonic()
        seconds, self._looked = max(now - self._looked, 1e-3), now
        models = self._core.models()
        self._series = {model: self._series.get(model) or _Series(_totals(model, NO_REQUESTS)) for model in models}
        for model, series in self._series.items():
            series.look(model, seconds)

    def _tick(self) -> None:
        self.look()
        self._next = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)


def _totals(model: Model, before: Histogram) -> _Totals:
    s = model.statistics.totals
    times = before if s.success.count == before.count else model.statistics.histograms()["total"]
    return _Totals(s.success.count, s.fail.count, s.rows, s.batches, times)


def quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile of the requests' times in milliseconds, from the counts per bucket of `EDGES_NS`; None without
    requests.

    Within a bucket the times are assumed to be uniform on a logarithmic scale, as the edges are.
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
