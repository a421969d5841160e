"""Which batches are so short that handing them to a worker thread and back costs more than computing them. Pure.

A small model's batch takes tens of microseconds. The way to a thread and back takes as long again, and while the thread
computes it fights the event loop for Python's lock. Such batches run on the event loop itself. That is decided by what batches
of the same shape and about the same size took, and taken back as soon as they take longer: the loop must not stand still.
Models whose batches may take any time, whatever those before took, are not for the loop (`ModelInterface.open_ended`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType

SHORT_S = 150e-6  # about what the way to a thread and back costs under load
# For a model that has the loop to itself, and a batch so small that the loop would have little else to do: a thread that
# computes it, and the loop that reads what comes and sends what is done, would wait for Python's lock again and again.
LONE_S, LONE_REQUESTS, LONE_BYTES = 2e-3, 8, 1 << 18
# More bytes take longer to copy than a short batch takes, whatever batches of their shape took: texts have any length.
LOOP_BYTES = 1 << 21
# A batch on the loop that takes so much processor time, or so long by the clock (the system may have given the core to another
# program, or the batch has waited for something), has to show for long that it was an exception.
STALL_S, STANDSTILL_S = 0.01, 0.05
FIRST = 8  # batches on a thread before the first on the loop: the first ones set things up
AFTER_STALL = 512
MAX_SIZES = 1024  # that are known; a client that varies its shapes endlessly costs no more
NEW = 1 / 8  # of a batch on the loop in the average
DRIFT = 1 / 64  # on the thread, where waiting for Python's lock is timed too, the shortest counts, and is slowly forgotten


NOTHING_KNOWN: Mapping[int, float] = MappingProxyType({})


def limit_s(requests: int, size: int, *, alone: bool) -> float:
    """How long a batch may take on the event loop, in seconds; -1 keeps it off the loop.

    Args:
        requests: in the batch.
        size: bytes that these bring.
        alone: no other model is busy on this loop.
    """
    if size > LOOP_BYTES:
        return -1.0
    return LONE_S if alone and requests <= LONE_REQUESTS and size <= LONE_BYTES else SHORT_S


class _Size:
    """Batches of one shape and about one size: up to twice as many rows.

    Attributes:
        seconds: that one takes.
        trials: batches to run on a thread before the next on the loop.
    """

    __slots__ = ("seconds", "trials")

    def __init__(self, seconds: float, trials: int) -> None:
        self.seconds = seconds
        self.trials = trials


class ShortBatches:
    """Learns what one model's batches take."""

    __slots__ = ("_known_s", "_sizes")

    def __init__(self, known_s: Mapping[int, float] = NOTHING_KNOWN) -> None:
        """One that has seen no batch.

        Args:
            known_s: seconds that batches take, by their rows; to be given only where all requests are of one shape.
        """
        self._known_s = sorted(known_s.items())
        self._sizes: dict[tuple[Hashable, int], _Size] = {}

    def suits(self, bucket: Hashable, rows: int, limit_s: float = SHORT_S) -> bool:
        """Whether a batch should run on the loop, as it takes no longer than `limit_s`."""
        size = self._sizes.get((bucket, rows.bit_length()))
        if size is None and self._known_s:
            size = self._size(bucket, rows)
        return size is not None and size.trials <= 0 and size.seconds <= limit_s

    def ran_on_loop(self, bucket: Hashable, rows: int, seconds: float, clock_s: float) -> None:
        """Learn from a batch that took `seconds` of the loop's processor time, and `clock_s` by the clock."""
        size = self._size(bucket, rows)
        size.seconds += NEW * (seconds - size.seconds)
        if seconds > STALL_S or clock_s > STANDSTILL_S:
            size.trials = AFTER_STALL

    def ran_on_thread(self, bucket: Hashable, rows: int, seconds: float) -> None:
        """Learn from a batch that took `seconds` on a thread."""
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
            # What is known of batches that are larger holds for these all the more.
            known = next((seconds for known_rows, seconds in self._known_s if known_rows >= rows), None)
            size = self._sizes[key] = _Size(0.0, FIRST) if known is None else _Size(known, 0)
        return size
