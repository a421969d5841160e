"""When requests are to be sent: as soon as an earlier one is answered, or at times that were set before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from serve.benchmark.load.order import Order

NANOSECONDS = 1_000_000_000
SEED = 2024
CHUNK = 1024


class Pacer(Protocol):
    """Says when the next requests are due; all times are nanoseconds on one clock."""

    def due(self, now_ns: int) -> list[int]:
        """The intended sending times, up to now, that have not been given out before."""

    def answered(self, count: int) -> None:
        """So many requests have ended, well or badly."""

    def next_ns(self) -> int | None:
        """When `due` will have something to give without an answer coming first; None where it will not."""

    def stop(self) -> None:
        """Nothing more is due."""

    @property
    def exhausted(self) -> bool:
        """Whether nothing will be due any more."""


def pacer_of(order: Order, start_ns: int) -> Pacer:
    """The pacer for this process's share of an order."""
    return ClosedLoop(order, start_ns) if order.rate is None else OpenLoop(order, start_ns)


class ClosedLoop:
    """So many requests in flight."""

    def __init__(self, order: Order, start_ns: int) -> None:
        self._free = order.concurrency or 0
        self._left = order.requests
        self._end_ns = None if order.seconds is None else start_ns + round(order.seconds * NANOSECONDS)

    def due(self, now_ns: int) -> list[int]:
        """One for each free place."""
        if self._end_ns is not None and now_ns >= self._end_ns:
            self._left = 0
        count = self._free if self._left is None else min(self._free, self._left)
        self._free -= count
        if self._left is not None:
            self._left -= count
        return [now_ns] * count

    def answered(self, count: int) -> None:
        """Their places are free."""
        self._free += count

    def next_ns(self) -> int | None:
        """The end, because it has to be noticed."""
        return None if self._left == 0 else self._end_ns

    def stop(self) -> None:
        """Nothing more is due."""
        self._left = 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing will be due any more."""
        return self._left == 0


class OpenLoop:
    """So many requests per second, evenly or as a Poisson process."""

    def __init__(self, order: Order, start_ns: int) -> None:
        self._times = intended_times(order, start_ns)
        self._next: int | None = next(self._times, None)
        # Until then nothing comes, which is part of the rate: a load that ended with its last request would show a higher one.
        seconds = order.seconds if order.requests is None else None
        self._end_ns = None if seconds is None else start_ns + round(seconds * NANOSECONDS)

    def due(self, now_ns: int) -> list[int]:
        """Those whose time has come."""
        due = []
        while self._next is not None and self._next <= now_ns:
            due.append(self._next)
            self._next = next(self._times, None)
        if self._end_ns is not None and now_ns >= self._end_ns:
            self._end_ns = None
        return due

    def answered(self, count: int) -> None:
        """Changes nothing: that is what makes the loop open."""

    def next_ns(self) -> int | None:
        """The next intended time, or the end, because it has to be noticed."""
        return self._end_ns if self._next is None else self._next

    def stop(self) -> None:
        """Nothing more is due."""
        self._next = self._end_ns = None

    @property
    def exhausted(self) -> bool:
        """Whether nothing will be due any more."""
        return self._next is None and self._end_ns is None


def intended_times(order: Order, start_ns: int) -> Iterator[int]:
    """This process's sending times, rising, within the order's seconds and its number of requests.

    The processes' times together are the order's: evenly spaced ones take turns, and independent Poisson processes add up to
    one. Random times are the same in every run.
    """
    index, processes = order.share
    rate = order.rate or 0.0
    end_ns = None if order.seconds is None else start_ns + round(order.seconds * NANOSECONDS)
    offsets = _random_s(rate / processes, index) if order.arrivals == "poisson" else _even_s(rate, index, processes)
    for count, offset_s in enumerate(offsets):
        time_ns = start_ns + round(offset_s * NANOSECONDS)
        if (end_ns is not None and time_ns >= end_ns) or (order.requests is not None and count >= order.requests):
            return
        yield time_ns


def _even_s(rate: float, index: int, processes: int) -> Iterator[float]:
    count = index
    while True:
        yield count / rate
        count += processes


def _random_s(rate: float, index: int) -> Iterator[float]:
    generator, passed_s = np.random.default_rng([SEED, index]), 0.0
    while True:
        for gap_s in generator.exponential(1 / rate, CHUNK):
            passed_s += gap_s
            yield passed_s
