"""Counters of one model version, in the meaning that Triton's clients give them. Written and read on the event loop only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Duration:
    """How often something happened and the nanoseconds it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Record `count` events that took `ns` nanoseconds in all."""
        self.count += count
        self.ns += ns


@dataclass(frozen=True, kw_only=True, slots=True)
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
class Statistics:
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

    def batch_done(self, times: BatchTimes, arrivals_ns: list[int], rows: int) -> None:
        """Record a batch whose requests, `rows` rows in all, arrived at `arrivals_ns`."""
        requests = len(arrivals_ns)
        stages = (times.assembled - times.started, times.computed - times.assembled, times.split - times.computed)
        for total, ns in zip((self.compute_input, self.compute_infer, self.compute_output), stages, strict=True):
            total.add(ns * requests, requests)
        self.queue.add(times.started * requests - sum(arrivals_ns), requests)
        self.success.add(times.split * requests - sum(arrivals_ns), requests)
        size = self.by_batch_size.setdefault(rows, BatchSizeStatistics())
        for per_size, ns in zip((size.compute_input, size.compute_infer, size.compute_output), stages, strict=True):
            per_size.add(ns)
        self.rows += rows
        self.batches += 1
        self.last_inference_ms = time.time_ns() // 1_000_000

    def failed(self, arrived_ns: int) -> None:
        """Record a request that was taken and got an error."""
        self.fail.add(time.monotonic_ns() - arrived_ns)
