"""Decides which batches run on the event loop, because handing them to a thread costs more than computing them. Pure policy.

A small model's batch takes tens of microseconds. The way to a thread and back takes as long again, and while the thread
computes it competes with the event loop for Python's lock. The decision is based on earlier batches of one shape and about one
size, and withdrawn as soon as they take longer: the loop must not stall. Models with batches of unpredictable time are excluded
(`ModelInterface.open_ended`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Final

SHORT_S: Final = 150e-6  # cost of the way to a thread and back under load
# The limit for small batches of a model that has the loop to itself: if a thread computed them, it and the loop would keep
# waiting for each other to release Python's lock.
LONE_S: Final = 2e-3
LONE_REQUESTS: Final = 8
LONE_BYTES: Final = 1 << 22
# Copying more bytes takes longer than a short batch; the shape of text inputs does not determine their size.
LOOP_BYTES: Final = 1 << 21
# A batch on the loop that takes this much CPU time, or this long by the clock (preemption, or a wait in the batch), sends the
# following AFTER_STALL batches to a thread.
STALL_S: Final = 0.01
STANDSTILL_S: Final = 0.05
FIRST: Final = 8  # batches on a thread before the first on the loop, because the first ones include set-up
AFTER_STALL: Final = 512
MAX_SIZES: Final = 1024  # bounds the memory against clients that vary their shapes
NEW: Final = 1 / 8  # weight of a batch on the loop in the average
# A time on a thread includes waits for Python's lock: the minimum is used, and forgotten at this rate.
DRIFT: Final = 1 / 64

ALONE_AFTER_S: Final = 1.0  # time in which no other model has computed, from which on a model has the loop to itself

NOTHING_KNOWN: Mapping[int, float] = MappingProxyType({})


def limit_s(requests: int, size: int, *, alone: bool) -> float:
    """Return the seconds that a batch of `size` bytes may take on the loop; -1 keeps it off. `alone`: no other model is busy
    there.
    """
    if alone and requests <= LONE_REQUESTS and size <= LONE_BYTES:
        return LONE_S
    return SHORT_S if size <= LOOP_BYTES else -1.0


class LoopOccupancy:
    """Tracks whether one model has the event loop to itself, so that its batches on the loop delay no other model."""

    __slots__ = ("_latest", "_since")

    def __init__(self) -> None:
        self._latest: int | None = None  # an id(): a reference would keep an unloaded model
        self._since = -math.inf

    def is_alone(self, who: object, now: float) -> bool:
        """Note that `who` computes at `now` (seconds); returns whether no other model has computed for ALONE_AFTER_S."""
        if id(who) != self._latest:
            self._latest, self._since = id(who), now
        return now - self._since >= ALONE_AFTER_S


class _Size:
    """Batches of one shape and about one size: up to twice as many rows.

    Attributes:
        seconds: estimated seconds per batch.
        trials: number of batches to run on a thread before the next one on the loop.
    """

    __slots__ = ("seconds", "trials")

    def __init__(self, seconds: float, trials: int) -> None:
        self.seconds = seconds
        self.trials = trials


class ShortBatches:
    """Learns how long one model's batches take."""

    __slots__ = ("_known_s", "_sizes")

    def __init__(self, known_s: Mapping[int, float] = NOTHING_KNOWN) -> None:
        """`known_s`: seconds per batch, by its rows; only for models whose requests all have one shape."""
        self._known_s = sorted(known_s.items())
        self._sizes: dict[tuple[Hashable, int], _Size] = {}

    def suits(self, bucket: Hashable, rows: int, limit_s: float = SHORT_S) -> bool:
        """Return whether a batch should run on the loop, because it takes at most `limit_s`."""
        size = self._sizes.get((bucket, rows.bit_length()))
        if size is None and self._known_s:
            size = self._size(bucket, rows)
        return size is not None and size.trials <= 0 and size.seconds <= limit_s

    def ran_on_loop(self, bucket: Hashable, rows: int, seconds: float, clock_s: float) -> None:
        """Learn from a batch that took `seconds` of the loop's CPU time, and `clock_s` by the clock."""
        size = self._size(bucket, rows)
        size.seconds += NEW * (seconds - size.seconds)
        if seconds > STALL_S or clock_s > STANDSTILL_S:
            size.trials = AFTER_STALL

    def ran_on_thread(self, bucket: Hashable, rows: int, seconds: float) -> None:
        size = self._size(bucket, rows)
        size.trials -= 1
        if not size.seconds or seconds < size.seconds:
            size.seconds = seconds
        else:
            size.seconds += DRIFT * (seconds - size.seconds)

    def _size(self, bucket: Hashable, rows: int) -> _Size:
        key = (bucket, rows.bit_length())
        size = self._sizes.get(key)
        if size is None:
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            # The time of a larger batch is an upper bound.
            known = next((seconds for known_rows, seconds in self._known_s if known_rows >= rows), None)
            size = self._sizes[key] = _Size(0.0, FIRST) if known is None else _Size(known, 0)
        return size
