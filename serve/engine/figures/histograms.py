"""How long requests spent in each stage, as histograms.

Recording keeps numbers; they are counted for some thousand requests at a time, or when somebody asks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

# Upper bounds, in nanoseconds: 1, 2 and 5 of every decade from 10 us to 10 s; what is longer falls into one more bucket.
EDGES_NS: tuple[int, ...] = (*(step * 10**power for power in range(4, 10) for step in (1, 2, 5)), 10**10)
EDGES = np.array(EDGES_NS, np.int64)
FOLD_REQUESTS = 4096  # counting so many takes 0.2 ms of the event loop; fewer cost more each, as the code is out of caches
BUCKETS = len(EDGES_NS) + 1
STAGES = ("queue", "compute_input", "compute_infer", "compute_output", "total")
QUEUE, COMPUTE, TOTAL = 0, [1, 2, 3], 4


class StageTimes(Protocol):
    """When one batch passed each stage, in nanoseconds on one clock."""

    @property
    def started(self) -> int:
        """Its requests left the queue."""

    @property
    def assembled(self) -> int:
        """Their inputs were one."""

    @property
    def computed(self) -> int:
        """The backend was done."""

    @property
    def split(self) -> int:
        """The answers were apart."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Requests by how long they took.

    Attributes:
        counts: per bucket: up to and with each edge of EDGES_NS, and one more beyond the last.
        ns: all of them together.
    """

    counts: tuple[int, ...]
    ns: int

    @property
    def count(self) -> int:
        """Requests in all."""
        return sum(self.counts)


@dataclass(slots=True)
class StageHistograms:
    """One histogram per stage; every request counts once in each. Used on one thread."""

    _counts: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros((len(STAGES), BUCKETS), np.int64))
    _ns: list[int] = field(default_factory=lambda: [0] * len(STAGES))
    _batches: array[int] = field(default_factory=lambda: array("q"))  # five numbers each: four times and the requests
    _arrivals: array[int] = field(default_factory=lambda: array("q"))

    def add(self, done: Iterable[tuple[StageTimes, list[int], int]]) -> None:
        """Record batches: when they passed each stage, when their requests arrived on the same clock, and their rows."""
        batches, arrivals = self._batches, self._arrivals
        for times, arrivals_ns, _ in done:
            batches.fromlist([times.started, times.assembled, times.computed, times.split, len(arrivals_ns)])
            arrivals.fromlist(arrivals_ns)
        if len(arrivals) >= FOLD_REQUESTS:
            self._fold()

    def read(self) -> dict[str, Histogram]:
        """What has been recorded, by stage."""
        self._fold()
        return {
            stage: Histogram(tuple(counts), ns)
            for stage, counts, ns in zip(STAGES, self._counts.tolist(), self._ns, strict=True)
        }

    def _fold(self) -> None:
        if not self._batches:
            return
        batches = np.array(self._batches).reshape(-1, 5)
        arrived = np.array(self._arrivals)
        del self._batches[:], self._arrivals[:]
        started, split, requests = batches[:, 0], batches[:, 3], batches[:, 4]
        own = np.stack([started.repeat(requests), split.repeat(requests)]) - arrived
        self._count([QUEUE, TOTAL], own, None)
        self._count(COMPUTE, np.diff(batches[:, :4], axis=1).T, requests)

    def _count(
        self, stages: list[int], ns: np.ndarray[Any, np.dtype[np.int64]], requests: np.ndarray[Any, np.dtype[np.int64]] | None
    ) -> None:
        """Count times, (stages, n), each for so many requests, (n); None is one."""
        buckets = EDGES.searchsorted(ns) + np.arange(len(stages))[:, None] * BUCKETS
        weights = None if requests is None else np.tile(requests, len(stages))
        counts = np.bincount(buckets.ravel(), weights, minlength=len(stages) * BUCKETS)
        self._counts[stages] += counts.reshape(len(stages), BUCKETS).astype(np.int64)
        for stage, spent in zip(stages, (ns.sum(axis=1) if requests is None else ns @ requests).tolist(), strict=True):
            self._ns[stage] += spent
