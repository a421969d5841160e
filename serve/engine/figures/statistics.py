"""Counters of one model version, in the meaning that Triton's clients give them. Written and read on the event loop only."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from serve.engine.errors import InferenceError
from serve.engine.figures.histograms import Histogram, StageHistograms

TOGETHER = 64  # batches
CANCELLED = "cancelled"
CAPITALS = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(slots=True)
class Duration:
    """How often something happened and the nanoseconds it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Record `count` events that took `ns` nanoseconds in all."""
        self.count += count
        self.ns += ns


@dataclass(kw_only=True, slots=True)  # frozen ones take twice as long to make
class BatchTimes:
    """When one batch passed each stage, on time.monotonic_ns()'s clock."""

    started: int
    assembled: int
    computed: int
    split: int


@dataclass(slots=True)
class BatchSizeStatistics:
    """Where the time of all batches of one size went; `count` is the number of such batches."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class Totals:
    """Totals since the model was loaded. Every successful request counts once in each of the four stages."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    by_batch_size: dict[int, BatchSizeStatistics] = field(default_factory=dict)
    rows: int = 0
    batches: int = 0
    last_inference_ms: int = 0  # since the epoch; 0: none yet
    failures: dict[str, int] = field(default_factory=dict)  # by `reason_of` the error

    def add(self, times: BatchTimes, arrivals_ns: list[int], rows: int) -> None:
        """Count a batch."""
        requests, arrived = len(arrivals_ns), sum(arrivals_ns)
        assembling = times.assembled - times.started
        computing = times.computed - times.assembled
        splitting = times.split - times.computed
        self.queue.add(times.started * requests - arrived, requests)
        self.compute_input.add(assembling * requests, requests)
        self.compute_infer.add(computing * requests, requests)
        self.compute_output.add(splitting * requests, requests)
        self.success.add(times.split * requests - arrived, requests)
        size = self.by_batch_size.get(rows)
        if size is None:
            size = self.by_batch_size[rows] = BatchSizeStatistics()
        size.compute_input.add(assembling)
        size.compute_infer.add(computing)
        size.compute_output.add(splitting)
        self.rows += rows
        self.batches += 1


class Statistics:
    """What a model has done. Batches are counted some dozens at a time, or when somebody asks, and not while answers go out.

    Attributes:
        latest: the batch whose answers are being handed over.
        latest_rows: of it.
        latest_failure: id() of the error that is being handed over, and the request's age in nanoseconds.
    """

    __slots__ = ("_histograms", "_totals", "_uncounted", "latest", "latest_failure", "latest_rows")

    def __init__(self) -> None:
        self._totals = Totals()
        self._histograms = StageHistograms()
        self._uncounted: list[tuple[BatchTimes, list[int], int]] = []
        self.latest: BatchTimes | None = None
        self.latest_rows = 0
        self.latest_failure = (0, 0)

    @property
    def totals(self) -> Totals:
        """All until now."""
        self._count()
        return self._totals

    def histograms(self) -> dict[str, Histogram]:
        """How long requests spent in each stage, until now."""
        self._count()
        return self._histograms.read()

    def batch_done(self, times: BatchTimes, arrivals_ns: list[int], rows: int) -> None:
        """Record a batch whose requests, `rows` rows in all, arrived at `arrivals_ns`."""
        self.latest, self.latest_rows = times, rows
        uncounted = self._uncounted
        uncounted.append((times, arrivals_ns, rows))
        if len(uncounted) == TOGETHER:
            self._count()

    def failed(self, arrived_ns: int, error: InferenceError | None = None) -> None:
        """Record a request of this model that got an error, or was refused a place; None: its client has gone."""
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
        totals = self._totals
        for times, arrivals_ns, rows in uncounted:
            totals.add(times, arrivals_ns, rows)
        totals.last_inference_ms = (time.time_ns() - time.monotonic_ns() + uncounted[-1][0].split) // 1_000_000
        self._histograms.add(uncounted)
        self._uncounted = []


def reason_of(error: InferenceError | None) -> str:
    """An error as a label: its class in lower case, as in "queue_full"; "cancelled" where the client has gone."""
    if error is None:
        return CANCELLED
    return _label(type(error))


def zeros(*errors: type[InferenceError]) -> dict[str, int]:
    """Counters that begin at zero, by reason. Prometheus sees no growth in one that is first told of when it has counted."""
    return {_label(error): 0 for error in errors}


def _label(error: type[InferenceError]) -> str:
    return CAPITALS.sub("_", error.__name__.removesuffix("Error")).lower()
