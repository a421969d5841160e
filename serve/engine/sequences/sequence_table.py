"""The sequences of one model version: the running ones, and the ones that wait for a slot."""

from __future__ import annotations

from heapq import heappop, heappush

from halfserve.serve.engine.sequences.sequence import Sequence, SequenceId


class SequenceTable:
    """The sequences of one model version: those with a slot run, the others wait for one in order of arrival.

    Attributes:
        slots: most sequences that can run at once.
        idle: running sequences without a request, with the start of their idle time (seconds), the longest idle first.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.idle: dict[Sequence, float] = {}
        self._by_key: dict[SequenceId, Sequence] = {}
        self._backlog: dict[Sequence, None] = {}
        self._free: list[int] = []  # slots that were used before, as a heap
        self._used = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._by_key) - len(self._backlog)

    @property
    def backlog(self) -> int:
        """Number of sequences without a slot."""
        return len(self._backlog)

    @property
    def has_free_slot(self) -> bool:
        """Whether a new sequence would run at once."""
        return not self._backlog and (bool(self._free) or self._used < self.slots)

    def find(self, key: SequenceId) -> Sequence | None:
        return self._by_key.get(key)

    def all(self) -> list[Sequence]:
        return list(self._by_key.values())

    def add(self, key: SequenceId) -> Sequence:
        """Add a sequence, with a slot if one is free."""
        sequence = self._by_key[key] = Sequence(key)
        sequence.slot = None if self._backlog else self._take_slot()
        if sequence.slot is None:
            self._backlog[sequence] = None
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and free its slot."""
        if self._by_key.get(sequence.key) is not sequence:
            return
        del self._by_key[sequence.key]
        self._backlog.pop(sequence, None)
        self.idle.pop(sequence, None)
        if sequence.slot is not None:
            heappush(self._free, sequence.slot)

    def next_from_backlog(self) -> Sequence | None:
        """Give a free slot to the sequence that has waited longest, and return it; None if none waits, or no slot is free."""
        if not self._backlog:
            return None
        slot = self._take_slot()
        if slot is None:
            return None
        sequence = next(iter(self._backlog))
        del self._backlog[sequence]
        sequence.slot = slot
        return sequence

    def _take_slot(self) -> int | None:
        """Take the lowest free slot, so that batches with a row per slot stay small."""
        if self._free:
            return heappop(self._free)
        if self._used == self.slots:
            return None
        self._used += 1
        return self._used - 1
