"""Counters and latency histograms of a model version, and counters of the server. Used on the event loop only."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from halfserve.serve.engine.errors import InferenceError

# Upper bounds in nanoseconds: 1, 2 and 5 of every decade from 10 us to 10 s; one more bucket holds longer times.
EDGES_NS: tuple[int, ...] = (*(step * 10**power for power in range(4, 10) for step in (1, 2, 5)), 10**10)
EDGES = np.array(EDGES_NS, np.int64)
BUCKETS: Final = len(EDGES_NS) + 1
STAGES = ("queue", "compute_input", "compute_infer", "compute_output", "total")
QUEUE, COMPUTE, TOTAL = 0, [1, 2, 3], 4
# Number of batches and requests that are counted at a time, in 0.2 ms of the event loop; smaller chunks cost more per request.
TOGETHER: Final = 1024
CANCELLED: Final = "cancelled"
WINDOW_NS: Final = 60 * 10**9  # Triton's window of quantiles
SLICE_NS: Final = 12 * 10**9
PARTS: Final = 32  # buckets of a doubling: a quantile is off by 1.1 % at most
PLACES: Final = 40 * PARTS  # up to 18 minutes
CAPITALS = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True)
class Histogram:
    """Number of requests by latency.

    Attributes:
        counts: number of requests per bucket: up to and including each edge of EDGES_NS, and one more beyond the last.
        ns: sum of all latencies.
    """

    counts: tuple[int, ...]
    ns: int

    @property
    def count(self) -> int:
        return sum(self.counts)


class LatencyWindow:
    """Latencies of the requests that ended in the last WINDOW_NS, by stage, for quantiles."""

    __slots__ = ("_slices",)

    def __init__(self) -> None:
        self._slices: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}

    def add(self, ns: np.ndarray[Any, np.dtype[np.int64]], ended: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Count latencies of shape (stages, n), in nanoseconds, of requests that ended at `ended`, (n)."""
        places = (np.log2(np.maximum(ns, 1)) * PARTS).astype(np.int64).clip(0, PLACES - 1)
        places += np.arange(len(STAGES))[:, None] * PLACES
        slices = ended // SLICE_NS
        for number in np.unique(slices).tolist():
            counts = np.bincount(places[:, slices == number].ravel(), minlength=len(STAGES) * PLACES)
            before = self._slices.get(number)
            self._slices[number] = counts if before is None else before + counts
        self._forget(int(ended.max()))

    def quantiles(self, wanted: Iterable[float], now_ns: int) -> dict[str, list[float]]:
        """Nanoseconds by stage, one number for each quantile that is wanted; NaN without requests in the window."""
        self._forget(now_ns)
        counts = np.zeros(len(STAGES) * PLACES, np.int64)
        for part in self._slices.values():
            counts += part
        at_most = counts.reshape(len(STAGES), PLACES).cumsum(axis=1)
        return {stage: [_quantile(row, share) for share in wanted] for stage, row in zip(STAGES, at_most, strict=True)}

    def _forget(self, now_ns: int) -> None:
        oldest = (now_ns - WINDOW_NS) // SLICE_NS
        self._slices = {number: counts for number, counts in self._slices.items() if number > oldest}


def _quantile(at_most: np.ndarray[Any, np.dtype[np.int64]], share: float) -> float:
    """Return the middle of the bucket that a quantile lies in, of cumulative counts."""
    count = int(at_most[-1])
    if not count:
        return math.nan
    place = int(at_most.searchsorted(max(1, math.ceil(share * count))))
    return float(2 ** ((place + 0.5) / PARTS))


class CountedBatches:
    """Batches as arrays, so that many are counted together.

    Attributes:
        own_ns: nanoseconds of each request in the stages QUEUE and TOTAL, (2, number of requests).
        computing_ns: nanoseconds of each batch in the stages COMPUTE, (3, number of batches).
        requests: number of requests of each batch.
        rows: number of rows of each batch.
        split: time at which each batch was split.
    """

    __slots__ = ("computing_ns", "own_ns", "requests", "rows", "split")

    def __init__(self, done: Iterable[tuple[BatchTimes, list[int], int]]) -> None:
        """Take batches: their stage times, the arrival times of their requests on the same clock, and their rows."""
        numbers: list[int] = []
        arrivals: list[int] = []
        for times, arrivals_ns, rows in done:
            numbers += [times.started, times.assembled, times.computed, times.split, len(arrivals_ns), rows]
            arrivals += arrivals_ns
        table = np.array(numbers, np.int64).reshape(-1, 6)
        started, self.split, self.requests, self.rows = table[:, 0], table[:, 3], table[:, 4], table[:, 5]
        ends = np.stack([started.repeat(self.requests), self.split.repeat(self.requests)])
        self.own_ns: np.ndarray[Any, np.dtype[np.int64]] = ends - np.array(arrivals, np.int64)
        self.computing_ns: np.ndarray[Any, np.dtype[np.int64]] = np.diff(table[:, :4], axis=1).T


@dataclass
class StageHistograms:
    """One histogram per stage; every request counts once in each. Used on one thread.

    Attributes:
        window: gets the same requests, for quantiles; None where there is none.
    """

    window: LatencyWindow | None = None

    _counts: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros((len(STAGES), BUCKETS), np.int64))
    _ns: list[int] = field(default_factory=lambda: [0] * len(STAGES))

    def add(self, done: CountedBatches) -> None:
        own, requests = done.own_ns, done.requests
        self._count([QUEUE, TOTAL], own, None)
        self._count(COMPUTE, done.computing_ns, requests)
        if self.window is not None and own.size:
            stages = np.concatenate([own[:1], done.computing_ns.repeat(requests, axis=1), own[1:]])
            self.window.add(stages, done.split.repeat(requests))

    def read(self) -> dict[str, Histogram]:
        """Return the histograms, by stage."""
        return {
            stage: Histogram(tuple(counts), ns)
            for stage, counts, ns in zip(STAGES, self._counts.tolist(), self._ns, strict=True)
        }

    def _count(
        self, stages: list[int], ns: np.ndarray[Any, np.dtype[np.int64]], requests: np.ndarray[Any, np.dtype[np.int64]] | None
    ) -> None:
        """Count latencies of shape (stages, n), each with a weight, (n); None is 1."""
        buckets = EDGES.searchsorted(ns) + np.arange(len(stages))[:, None] * BUCKETS
        weights = None if requests is None else np.tile(requests, len(stages))
        counts = np.bincount(buckets.ravel(), weights, minlength=len(stages) * BUCKETS)
        self._counts[stages] += counts.reshape(len(stages), BUCKETS).astype(np.int64)
        for stage, spent in zip(stages, (ns.sum(axis=1) if requests is None else ns @ requests).tolist(), strict=True):
            self._ns[stage] += spent


@dataclass
class Duration:
    """A number of events and their total nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns


class BatchTimes:
    """The times at which one batch passed each stage, in nanoseconds on time.monotonic_ns()'s clock.

    Attributes:
        started: time at which its requests left the queue.
        assembled: time at which their inputs were concatenated.
        computed: time at which the backend had computed.
        split: time at which the answers were split.
    """

    __slots__ = ("assembled", "computed", "split", "started")

    def __init__(self, *, started: int, assembled: int, computed: int, split: int) -> None:
        self.started = started
        self.assembled = assembled
        self.computed = computed
        self.split = split


@dataclass
class BatchSizeStatistics:
    """Compute times of all batches of one size, by stage; `count` is the number of such batches."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass
class Totals:
    """Totals since the model was loaded.

    Every computed request counts once in each of the four stages; a request that the response cache answered counts in `queue`,
    `success` and `cache_hit`.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)  # time of the look-ups
    cache_miss: Duration = field(default_factory=Duration)  # time of the look-ups, and of keeping the answers
    by_batch_size: dict[int, BatchSizeStatistics] = field(default_factory=dict)
    rows: int = 0
    batches: int = 0
    last_inference_ms: int = 0  # milliseconds since the epoch; 0 before the first batch
    failures: dict[str, int] = field(default_factory=dict)  # number of failures, by `reason_of` the error

    def add(self, done: CountedBatches) -> None:
        requests, computing = done.requests, done.computing_ns
        count, (queued_ns, spent_ns) = int(requests.sum()), done.own_ns.sum(axis=1).tolist()
        assembling_ns, computing_ns, splitting_ns = (computing @ requests).tolist()
        self.queue.add(queued_ns, count)
        self.compute_input.add(assembling_ns, count)
        self.compute_infer.add(computing_ns, count)
        self.compute_output.add(splitting_ns, count)
        self.success.add(spent_ns, count)
        for rows in set(done.rows.tolist()):
            size = self.by_batch_size.get(rows)
            if size is None:
                size = self.by_batch_size[rows] = BatchSizeStatistics()
            of_size = computing[:, done.rows == rows]
            assembling_ns, computing_ns, splitting_ns = of_size.sum(axis=1).tolist()
            size.compute_input.add(assembling_ns, of_size.shape[1])
            size.compute_infer.add(computing_ns, of_size.shape[1])
            size.compute_output.add(splitting_ns, of_size.shape[1])
        self.rows += int(done.rows.sum())
        self.batches += len(requests)


class Statistics:
    """Counters of one model version, with the meaning of Triton's statistics.

    Batches are counted many at a time, or when read, and not while answers are sent.

    Attributes:
        latest: the batch whose answers are being delivered.
        latest_rows: rows of that batch.
        latest_failure: id() of the error that is being delivered, and the request's age in nanoseconds.
        request_bytes: size of all clients' requests, as gRPC messages.
        response_bytes: size of all responses to clients, as gRPC messages.
    """

    __slots__ = (
        "_histograms",
        "_totals",
        "_uncounted",
        "_uncounted_requests",
        "latest",
        "latest_failure",
        "latest_rows",
        "request_bytes",
        "response_bytes",
    )

    def __init__(self) -> None:
        self._totals = Totals()
        self._histograms = StageHistograms()
        self._uncounted: list[tuple[BatchTimes, list[int], int]] = []
        self._uncounted_requests = 0  # their number of batches and of requests
        self.latest: BatchTimes | None = None
        self.latest_rows = 0
        self.latest_failure = (0, 0)
        self.request_bytes = self.response_bytes = 0

    @property
    def totals(self) -> Totals:
        self._count()
        return self._totals

    def histograms(self) -> dict[str, Histogram]:
        """Return the latencies of requests in each stage."""
        self._count()
        return self._histograms.read()

    def keep_latencies(self) -> None:
        """Keep the latencies of the last minute from now on, for `quantiles`."""
        self._histograms.window = LatencyWindow()

    def quantiles(self, wanted: Iterable[float]) -> dict[str, list[float]]:
        """Nanoseconds by stage, of computed requests of the last minute; empty if these are not kept."""
        self.histograms()
        window = self._histograms.window
        return {} if window is None else window.quantiles(wanted, time.monotonic_ns())

    def batch_done(self, times: BatchTimes, arrivals_ns: list[int], rows: int) -> None:
        """Record a batch whose requests, `rows` rows in all, arrived at `arrivals_ns`."""
        self.latest, self.latest_rows = times, rows
        self._uncounted.append((times, arrivals_ns, rows))
        self._uncounted_requests += 1 + len(arrivals_ns)
        if self._uncounted_requests >= TOGETHER:
            self._count()

    def cache_hits(self, count: int, *, arrived_ns: int, asked_ns: int, looked_ns: int, ended_ns: int) -> None:
        """Record requests that the response cache answers now; they replace `latest` by a batch without rows.

        Args:
            count: number of requests.
            arrived_ns: sum of their arrival times.
            asked_ns: sum of the times at which they were looked up.
            looked_ns: nanoseconds that these look-ups took.
            ended_ns: the present time.
        """
        totals = self._totals
        totals.success.add(ended_ns * count - arrived_ns, count)
        totals.queue.add(asked_ns - arrived_ns, count)
        totals.cache_hit.add(looked_ns, count)
        self.latest, self.latest_rows = BatchTimes(started=ended_ns, assembled=ended_ns, computed=ended_ns, split=ended_ns), 0

    def cache_miss(self, spent_ns: int) -> None:
        """Record the time of the response cache for an answer that it did not have and that was computed."""
        self._totals.success.ns += spent_ns
        self._totals.cache_miss.add(spent_ns)

    def failed(self, arrived_ns: int, error: InferenceError | None = None) -> None:
        """Record a request that got an error or was refused; None if its client has gone."""
        spent_ns = time.monotonic_ns() - arrived_ns
        self._totals.fail.add(spent_ns)
        self.latest_failure = (id(error), spent_ns)
        reason = reason_of(error)
        failures = self._totals.failures
        failures[reason] = failures.get(reason, 0) + 1

    def _count(self) -> None:
        uncounted = self._uncounted
        if not uncounted:
            return
        done = CountedBatches(uncounted)
        self._totals.add(done)
        self._histograms.add(done)
        self._totals.last_inference_ms = (time.time_ns() - time.monotonic_ns() + uncounted[-1][0].split) // 1_000_000
        self._uncounted, self._uncounted_requests = [], 0


def reason_of(error: InferenceError | None) -> str:
    """Return an error as a label: its class in lower case, such as "queue_full"; "cancelled" for None."""
    if error is None:
        return CANCELLED
    return _label(type(error))


def zeros(*errors: type[InferenceError]) -> dict[str, int]:
    """Return counters at zero, by reason: Prometheus sees no increase in a counter that first appears with a count."""
    return {_label(error): 0 for error in errors}


def _label(error: type[InferenceError]) -> str:
    return CAPITALS.sub("_", error.__name__.removesuffix("Error")).lower()


@dataclass(frozen=True)
class CustomMetric:
    """A family of metrics that a model declares.

    Attributes:
        name: name of the family.
        text: description of the family.
        kind: "counter", "gauge" or "histogram".
        samples: tuples of the name's suffix, labels and value.
    """

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


@dataclass(frozen=True, kw_only=True)
class LatencyFigures:
    """Selection of the latency metrics that have Triton's names.

    Attributes:
        has_counters: whether there are counters of durations.
        quantiles: quantiles of the summaries, each between 0 and 1; empty for no summaries.
        has_histograms: whether there are histograms of the time to the first response.
    """

    has_counters: bool = True
    has_histograms: bool = False
    quantiles: tuple[float, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A figure of the server, with the name, kind and help text of its metric.

    Attributes:
        kind: "counter", whose name ends in _total, or "gauge".
        read: returns the figure's value; called on the event loop.
    """

    kind: str
    name: str
    text: str
    read: Callable[[], float]


@dataclass
class ServerFigures:
    """Counters since the start, and gauges that other parts of the server provide.

    Attributes:
        latencies: selection of the latency metrics; set before there are models.
        refused: number of inference requests that reached no model's queue, by `reason_of` the error.
        readings: figures that other packages have declared, by the metric's name.
        custom_metrics: returns the metrics that models declare.
    """

    latencies: LatencyFigures = field(default_factory=LatencyFigures)
    refused: dict[str, int] = field(default_factory=dict)
    readings: dict[str, Reading] = field(default_factory=dict)
    custom_metrics: Callable[[], list[CustomMetric]] = list

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Declare a gauge of the server, by its metric's name and help text, and the function that reads it."""
        self.readings[name] = Reading("gauge", name, text, read)

    def counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Declare a counter of the server; see `gauge`. Its name ends in _total."""
        self.readings[name] = Reading("counter", name, text, read)

    def refuse(self, error: InferenceError) -> None:
        """Record a request that was invalid, or asked for an unknown model."""
        reason = reason_of(error)
        self.refused[reason] = self.refused.get(reason, 0) + 1
