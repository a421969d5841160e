"""Requests that can be concatenated, waiting in line: by priority first, by arrival within it. Pure, as `batch_queue`."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

# Requests that have left are cleared out of the middle of a line once they are this many and outnumber those that wait.
MANY_GONE = 64


class Waiting(Protocol):
    """What the policy needs to know of a request, and one place where it may write."""

    line: object  # the WaitingLine it stands in, None where it stands in none: leaving needs no search

    @property
    def rows(self) -> int:
        """Rows it adds to a batch, at least 1."""

    @property
    def size(self) -> int:
        """Bytes it holds."""

    @property
    def bucket(self) -> Hashable:
        """What it can be concatenated with."""

    @property
    def arrived_ns(self) -> int:
        """When it arrived, in nanoseconds on the clock that everything here is on."""

    @property
    def deadline(self) -> float | None:
        """When its answer must be there, in seconds; None whenever it is done."""

    @property
    def leave_by(self) -> float | None:
        """When it must have left the line to be computed, in seconds; None waits for ever."""

    @property
    def priority(self) -> int:
        """Its level, 0 the most urgent."""

    @property
    def patience(self) -> float | None:
        """When it is to stand behind those of its level that have not waited too long, in seconds; None never."""


T = TypeVar("T", bound=Waiting)


class WaitingLine(Generic[T]):
    """Two lines per priority: the second is for those that have waited beyond their patience.

    A request that is cancelled leaves at once however long the line is: it is only marked, and skipped when its turn comes.

    Attributes:
        bucket: of all its requests.
        rows: of all that wait; 0 when nobody does.
        soonest_deadline: no deadline in the line is earlier (some that were may have left), in seconds; None where nobody
            had one since the line was last empty.
        soonest_leave_by: the same of the times by which requests must have left.
    """

    __slots__ = ("_gone", "_lines", "bucket", "rows", "soonest_deadline", "soonest_leave_by")

    def __init__(self, bucket: Hashable, levels: int) -> None:
        self.bucket = bucket
        self.rows = 0
        self.soonest_deadline: float | None = None
        self.soonest_leave_by: float | None = None
        self._lines: tuple[deque[T], ...] = tuple(deque() for _ in range(2 * levels))
        self._gone = 0

    def urgency(self, now: float) -> tuple[int, int]:
        """Level and arrival of whoever is next at `now`, in seconds: smaller goes first. Somebody must be in line.

        On its way it sends those whose patience has ended to the second line of their level.
        """
        for index, line in enumerate(self._lines):
            while line:
                request = line[0]
                if request.line is not self:
                    line.popleft()
                    self._gone -= 1
                elif not index % 2 and request.patience is not None and request.patience <= now:
                    self._lines[index + 1].append(line.popleft())
                else:
                    return index, request.arrived_ns
        raise LookupError("nobody is in line")

    @property
    def first_arrival(self) -> float:
        """When the one that has waited longest arrived, in seconds. Somebody must be in line."""
        if len(self._lines) == 2 and not self._lines[1]:
            return self._head(self._lines[0]).arrived_ns / 1e9
        return min(self._head(line).arrived_ns for line in self._lines if self._cleared(line)) / 1e9

    def __iter__(self) -> Iterator[T]:
        """Those who wait, in no promised order."""
        return (request for line in self._lines for request in line if request.line is self)

    def add(self, request: T) -> None:
        """Let a request in at the end of its level."""
        self._lines[2 * request.priority].append(request)
        self.rows += request.rows
        request.line = self
        deadline, leave_by = request.deadline, request.leave_by
        if deadline is not None and (self.soonest_deadline is None or deadline < self.soonest_deadline):
            self.soonest_deadline = deadline
        if leave_by is not None and (self.soonest_leave_by is None or leave_by < self.soonest_leave_by):
            self.soonest_leave_by = leave_by

    def remove(self, request: T) -> bool:
        """Let a request leave; False when it is not in line."""
        if request.line is not self:
            return False
        request.line = None
        self.rows -= request.rows
        self._gone += 1
        if not self.rows:
            self._clear()
        elif self._gone > MANY_GONE and self._gone > sum(map(len, self._lines)) // 2:
            self._sweep()
        return True

    def take(self, now: float, most_rows: int, finish: float) -> tuple[list[T], list[T], int]:
        """Let the next ones leave.

        On its way it sends those whose patience has ended to the second line of their level.

        Args:
            now: in seconds; who had to leave by then leaves uncounted.
            most_rows: in one batch; whoever is first goes even if it alone has more.
            finish: the soonest that the batch could end; so does who must be answered by then.

        Returns:
            Those that go together, those that are too late, and the rows of the former.
        """
        taken: list[T] = []
        late: list[T] = []
        rows = 0
        bounded = self.soonest_deadline is not None or self.soonest_leave_by is not None
        for index, line in enumerate(self._lines):
            while line:
                request = line[0]
                if request.line is not self:
                    line.popleft()
                    self._gone -= 1
                elif not index % 2 and request.patience is not None and request.patience <= now:
                    self._lines[index + 1].append(line.popleft())
                elif rows and rows + request.rows > most_rows:
                    return self._left(taken, late, rows)
                else:
                    line.popleft()
                    request.line = None
                    if bounded and is_late(request, now, finish):
                        self.rows -= request.rows
                        late.append(request)
                    else:
                        taken.append(request)
                        rows += request.rows
        return self._left(taken, late, rows)

    @property
    def soonest(self) -> float | None:
        """The sooner of both bounds, in seconds."""
        return _earliest(self.soonest_deadline, self.soonest_leave_by)

    def take_late(self, now: float) -> list[T]:
        """Let all leave whose time has run out by `now`, in seconds, wherever they stand."""
        late = [request for request in self if is_late(request, now, now)]
        for request in late:
            self.remove(request)
        self.soonest_deadline = _earliest(*(request.deadline for request in self))
        self.soonest_leave_by = _earliest(*(request.leave_by for request in self))
        return late

    def _left(self, taken: list[T], late: list[T], rows: int) -> tuple[list[T], list[T], int]:
        self.rows -= rows
        if not self.rows:
            self._clear()
        return taken, late, rows

    def _head(self, line: deque[T]) -> T:
        while line[0].line is not self:
            line.popleft()
            self._gone -= 1
        return line[0]

    def _cleared(self, line: deque[T]) -> bool:
        """Whether somebody waits in it."""
        while line and line[0].line is not self:
            line.popleft()
            self._gone -= 1
        return bool(line)

    def _clear(self) -> None:
        for line in self._lines:
            line.clear()
        self._gone = 0
        self.soonest_deadline = self.soonest_leave_by = None

    def _sweep(self) -> None:
        for line in self._lines:
            here = [request for request in line if request.line is self]
            line.clear()
            line.extend(here)
        self._gone = 0


def is_late(request: Waiting, now: float, finish: float) -> bool:
    """Whether a request that leaves its line now is of no use in a batch that ends at `finish`."""
    deadline, leave_by = request.deadline, request.leave_by
    return (leave_by is not None and leave_by <= now) or (deadline is not None and deadline <= finish)


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
