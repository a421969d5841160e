"""Ends what lasts too long in sequences: idle sequences, and requests that wait for their turn or a slot."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence import Sequence, Step

SWEEP_S: Final = 0.02  # least seconds between two searches for requests that wait too long


class IdleSequences:
    """The running sequences without a request, the longest idle first."""

    def __init__(self, idle_s: float, expire: Callable[[list[Sequence]], None]) -> None:
        """`expire`: takes the sequences that have been idle for `idle_s` seconds, and are no longer here."""
        self._idle_s = idle_s
        self._expire = expire
        self._since: dict[Sequence, float] = {}  # start of their idle time, in seconds
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sequence: Sequence) -> None:
        """Add a sequence whose last request was just answered."""
        self._since[sequence] = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._check)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that has a request again."""
        self._since.pop(sequence, None)

    def take_all(self) -> list[Sequence]:
        """Remove and return all sequences."""
        sequences = list(self._since)
        self._since.clear()
        return sequences

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        expired: list[Sequence] = []
        for sequence, since in self._since.items():
            if since + self._idle_s > now:
                self._timer = asyncio.get_running_loop().call_later(since + self._idle_s - now, self._check)
                break
            expired.append(sequence)
        for sequence in expired:
            del self._since[sequence]
        self._expire(expired)


class WaitingSteps:
    """Counts the requests that wait for their turn or a slot, and has those removed that wait too long.

    Attributes:
        count: number of these requests.
        size: bytes of these requests.
    """

    def __init__(self, drop_late: Callable[[float], None]) -> None:
        """`drop_late`: drops requests that are late at a time, in seconds, and calls `watch` for the others."""
        self.count = self.size = 0
        self._drop_late = drop_late
        self._timer: asyncio.TimerHandle | None = None
        self._due, self._checked = math.inf, -math.inf  # times of the next and the last check

    def add(self, step: Step) -> None:
        """Count a request that joins the waiting requests of its sequence."""
        request = step.request
        if step.sequence.slot is not None:
            request.leave_by = None  # as in Triton, only requests that wait for a slot expire
        step.sequence.waiting.append(step)
        self.count += 1
        self.size += request.size
        if request.deadline is not None or request.leave_by is not None:
            self.watch(request)

    def left(self, step: Step) -> None:
        """Count a request that has left the waiting requests of its sequence."""
        self.count -= 1
        self.size -= step.request.size

    def watch(self, request: InferRequest) -> None:
        """Schedule a check for requests that wait too long, at the latest when this one does."""
        moment = min(end for end in (request.deadline, request.leave_by, math.inf) if end is not None)
        if moment < self._due:
            self.stop()
            self._due = moment
            delay_s = max(moment, self._checked + SWEEP_S) - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._check)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._checked = time.monotonic()
        self._timer, self._due = None, math.inf
        self._drop_late(self._checked)
