"""Requests that can be concatenated, waiting in line: by priority first, by arrival within it. Pure, as `batch_queue`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the policy needs to know of a request."""

    @property
    def rows(self) -> int:
        """Rows it adds to a batch."""

    @property
    def bucket(self) -> Hashable:
        """What it can be concatenated with."""

    @property
    def deadline(self) -> float | None:
        """When it is no longer worth computing, in seconds."""

    @property
    def priority(self) -> int:
        """Its level, 0 the most urgent."""

    @property
    def patience(self) -> float | None:
        """When it is to stand behind all others of its bucket, in seconds; None never."""


T = TypeVar("T", bound=Waiting)


class WaitingLine(Generic[T]):
    """One line per priority; the last one is for those that have waited beyond their patience."""

    def __init__(self, levels: int) -> None:
        # By identity, so that one that is cancelled leaves at once however long the line is.
        self._lines: list[OrderedDict[int, tuple[float, T]]] = [OrderedDict() for _ in range(levels + 1)]
        self.rows = 0

    def __bool__(self) -> bool:
        return any(self._lines)

    @property
    def urgency(self) -> tuple[int, float]:
        """Level and arrival of whoever is next: smaller goes first. Somebody must be in line."""
        return next((level, next(iter(line.values()))[0]) for level, line in enumerate(self._lines) if line)

    @property
    def first_arrival(self) -> float:
        """When the one that has waited longest arrived. Somebody must be in line."""
        return min(next(iter(line.values()))[0] for line in self._lines if line)

    def add(self, request: T, now: float) -> None:
        """Let a request in at the end of its level."""
        self._lines[request.priority][id(request)] = (now, request)
        self.rows += request.rows

    def remove(self, request: T) -> bool:
        """Let a request leave; False when it is not in line."""
        for line in self._lines:
            if line.pop(id(request), None) is not None:
                self.rows -= request.rows
                return True
        return False

    def next_in_line(self, now: float) -> Iterator[T]:
        """Whoever is next, again and again; each must be removed before the next one is asked for.

        On its way it sends those whose patience has ended to the last line.
        """
        last = len(self._lines) - 1
        for level, line in enumerate(self._lines):
            while line:
                key, (arrived, request) = next(iter(line.items()))
                if level != last and request.patience is not None and request.patience <= now:
                    del line[key]
                    self._lines[last][key] = (arrived, request)
                else:
                    yield request
