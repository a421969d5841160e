"""Chooses which waiting requests of different lengths share a batch. Pure.

Padding a request costs the time to compute its empty places; a batch of its own has the fixed cost of a batch. So the waiting
lengths, in order, are divided into the groups that take the least time together, by the batch costs so far, and the group with
the most urgent request is the next batch. No request is passed over: the most urgent one is always in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final

from halfserve.serve.engine.queueing.batch_costs import BatchCosts
from halfserve.serve.engine.queueing.padding import Padding
from halfserve.serve.engine.queueing.waiting_line import WaitingLine

NEAR: Final = 48  # lengths to consider on each side of the most urgent request's
GAIN: Final = 0.02  # part by which a shared batch must be cheaper, because predictions are not exact


class MixedLengths:
    """Chooses the lengths of one model's batches.

    Attributes:
        costs: learned batch durations.
        padding: tells which shapes can be padded to one.
    """

    __slots__ = ("_max_tokens", "costs", "padding")

    def __init__(self, padding: Padding, costs: BatchCosts) -> None:
        self.padding = padding
        self.costs = costs
        self._max_tokens = padding.settings.max_tokens

    def observe(self, bucket: Hashable, rows: int, seconds: float) -> None:
        """Learn from a batch whose longest request belongs to `bucket`."""
        place = self.padding.place(bucket)
        if place is not None:
            self.costs.observe(rows, place.padded, seconds)

    def most_rows(self, bucket: Hashable, rows: int) -> int:
        """Return `rows`, or fewer if these have too many tokens; at least one."""
        place = self.padding.place(bucket)
        if self._max_tokens is None or place is None:
            return rows
        return max(1, min(rows, self._max_tokens // max(1, place.padded)))

    def group(
        self, first: WaitingLine, lines: Iterable[WaitingLine], most_rows: Callable[[Hashable], int], now: float, begins: float
    ) -> list[WaitingLine]:
        """Return the lines whose requests form the next batch, all of them together.

        Args:
            first: the line with the most urgent request.
            lines: all lines, by shape.
            most_rows: returns the most rows of a batch whose longest requests belong to a bucket.
            now: present time in seconds.
            begins: time at which the batch will be computed, in seconds.

        Returns:
            `first`, and others in rising length; or `first` alone, which may hold more rows than fit into one batch.
        """
        place = self.padding.place(first.bucket)
        if place is None:
            return [first]
        level = first.urgency(now)[0] // 2
        near: list[tuple[int, int, WaitingLine]] = []
        for line in lines:
            other = self.padding.place(line.bucket)
            # A less urgent line is excluded: it may have a longer length, and would delay the more urgent one.
            if other is not None and line.rows and other.family == place.family and line.urgency(now)[0] // 2 == level:
                near.append((other.padded, other.length, line))
        if not self.costs.is_confident:
            near = [entry for entry in near if entry[0] == place.padded]
        if len(near) < 2:
            return [first]
        near.sort(key=_by_length)
        middle = next(index for index, entry in enumerate(near) if entry[2] is first)
        near = near[max(0, middle - NEAR) : middle + NEAR + 1]
        group = self._cheapest(near, first, most_rows)
        if len(group) < 2 or (self.costs.is_confident and self._would_be_late(group, begins)):
            return [first]
        return group

    def _cheapest(
        self, near: list[tuple[int, int, WaitingLine]], first: WaitingLine, most_rows: Callable[[Hashable], int]
    ) -> list[WaitingLine]:
        """Return the lines that share a batch with `first` when all lines together take the least time."""
        count = len(near)
        best = [0.0] * (count + 1)  # least seconds for the first lines
        begin = [0] * (count + 1)  # index of the first line in the last batch of these
        for end in range(1, count + 1):
            length, _, longest = near[end - 1]
            most = self.most_rows(longest.bucket, most_rows(longest.bucket))
            rows, start = 0, end
            while start > 0:
                start -= 1
                rows += near[start][2].rows
                if rows > most and start < end - 1:
                    break
                took_s = self._seconds(rows, length, most)
                if start < end - 1:
                    took_s *= 1.0 + GAIN
                took_s += best[start]
                if start == end - 1 or took_s < best[end]:
                    best[end], begin[end] = took_s, start
        end = count
        while True:
            lines = [entry[2] for entry in near[begin[end] : end]]
            if first in lines:
                return lines
            end = begin[end]

    def _seconds(self, rows: int, length: int, most: int) -> float:
        costs = self.costs
        if not costs.is_confident:
            return float(-(-rows // most))  # all have one length, so that fewer batches are better
        if rows <= most:
            return costs.seconds(rows, length)
        full, rest = divmod(rows, most)
        return full * costs.seconds(most, length) + (costs.seconds(rest, length) if rest else 0.0)

    def _would_be_late(self, group: list[WaitingLine], begins: float) -> bool:
        """Return whether a request in these lines could miss its deadline in a batch of all of them."""
        deadlines = [line.soonest_deadline for line in group if line.soonest_deadline is not None]
        if not deadlines:
            return False
        longest = self.padding.place(group[-1].bucket)
        length = 0 if longest is None else longest.padded
        return begins + self.costs.seconds(sum([line.rows for line in group]), length) >= min(deadlines)


def _by_length(entry: tuple[int, int, WaitingLine]) -> tuple[int, int]:
    return entry[0], entry[1]
