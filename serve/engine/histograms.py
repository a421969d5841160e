"""How long requests spent in each stage, as histograms.

Recording is an append; the counting is done for some hundred requests at a time, or when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

# Upper bounds, in nanoseconds: 1, 2 and 5 of every decade from 10 us to 10 s; what is longer falls into one more bucket.
EDGES_NS: tuple[int, ...] = (*(step * 10**power for power in range(4, 10) for step in (1, 2, 5)), 10**10)
EDGES = np.array(EDGES_NS, np.int64)
FOLD_REQUESTS = 512  # counting so many takes some 150 us of the event loop: less than most batches
STAGES = ("queue", "compute_input", "compute_infer", "compute_output", "total")


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

    _counts: np.ndarray[Any, np.dtype[np.int64]] = field(
        default_factory=lambda: np.zeros((len(STAGES), len(EDGES_NS) + 1), np.int64)
    )
    _ns: list[int] = field(default_factory=lambda: [0] * len(STAGES))
    _batches: list[int] = field(default_factory=list)  # five numbers each: four times and the requests
    _arrivals: list[int] = field(default_factory=list)

    def add(self, times: StageTimes, arrivals_ns: Sequence[int]) -> None:
        """Record a batch; the arrivals are on the clock of its times."""
        self._batches += (times.started, times.assembled, times.computed, times.split, len(arrivals_ns))
        self._arrivals += arrivals_ns
        if len(self._arrivals) >= FOLD_REQUESTS:
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
        started, assembled, computed, split, requests = np.array(self._batches, np.int64).reshape(-1, 5).T
        arrived = np.array(self._arrivals, np.int64)
        self._batches.clear()
        self._arrivals.clear()
        self._count(0, started.repeat(requests) - arrived)
        self._count(1, (assembled - started).repeat(requests))
        self._count(2, (computed - assembled).repeat(requests))
        self._count(3, (split - computed).repeat(requests))
        self._count(4, split.repeat(requests) - arrived)

    def _count(self, stage: int, ns: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._counts[stage] += np.bincount(EDGES.searchsorted(ns), minlength=len(EDGES_NS) + 1)
        self._ns[stage] += int(ns.sum())
