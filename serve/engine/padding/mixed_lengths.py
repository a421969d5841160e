"""Chooses which waiting requests of different lengths share a batch. Pure.

Padding a request costs the time to compute its empty places; a batch of its own has the fixed cost of a batch. So the waiting
lengths, in order, are divided into the groups that take the least time together, by the batch costs so far, and the group with
the most urgent request is the next batch. No request is passed over: the most urgent one is always in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final

from halfserve.serve.engine.padding.batch_costs import BatchCosts
from halfserve.serve.engine.padding.padding import Padding

NEAR: Final = 48  # lengths to consider on each side of the most urgent request's
GAIN: Final = 0.02  # part by which a shared batch must be cheaper, because predictions are not exact


class Candidate:
    """The waiting requests of one shape, which may share the next batch with others.

    Attributes:
        bucket: their bucket.
        rows: their rows.
        deadline: their soonest deadline in seconds; None for none.
        length: their length, once `MixedLengths.group` has found it.
        padded: least length to which they are padded, likewise.
    """

    __slots__ = ("bucket", "deadline", "length", "padded", "rows")

    def __init__(self, bucket: Hashable, rows: int, deadline: float | None) -> None:
        self.bucket = bucket
        self.rows = rows
        self.deadline = deadline
        self.length = self.padded = 0


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
        found = self.padding.length_of(bucket)
        if found is not None:
            self.costs.observe(rows, found.padded, seconds)

    def most_rows(self, bucket: Hashable, rows: int) -> int:
        """Return `rows`, or fewer if these have too many tokens; at least one."""
        found = self.padding.length_of(bucket)
        if self._max_tokens is None or found is None:
            return rows
        return max(1, min(rows, self._max_tokens // max(1, found.padded)))

    def group(
        self, first: Candidate, others: Iterable[Candidate], most_rows: Callable[[Hashable], int], begins: float
    ) -> list[Hashable]:
        """Return the buckets whose waiting requests form the next batch, all of them together.

        Args:
            first: the bucket with the most urgent request.
            others: the other buckets that are as urgent. A less urgent one must not be among them: it may have a longer length,
                and would delay the more urgent one.
            most_rows: returns the most rows of a batch whose longest requests belong to a bucket.
            begins: time at which the batch will be computed, in seconds.

        Returns:
            Buckets in rising length; or that of `first` alone, which may hold more rows than fit into one batch.
        """
        found = self.padding.length_of(first.bucket)
        if found is None:
            return [first.bucket]
        first.length, first.padded = found.length, found.padded
        near = [first]
        for candidate in others:
            other = self.padding.length_of(candidate.bucket)
            if other is not None and other.family == found.family:
                candidate.length, candidate.padded = other.length, other.padded
                near.append(candidate)
        if not self.costs.is_confident:
            near = [candidate for candidate in near if candidate.padded == first.padded]
        if len(near) < 2:
            return [first.bucket]
        near.sort(key=_by_length)
        middle = near.index(first)
        near = near[max(0, middle - NEAR) : middle + NEAR + 1]
        group = self._cheapest(near, first, most_rows)
        if len(group) < 2 or (self.costs.is_confident and self._would_be_late(group, begins)):
            return [first.bucket]
        return [candidate.bucket for candidate in group]

    def _cheapest(self, near: list[Candidate], first: Candidate, most_rows: Callable[[Hashable], int]) -> list[Candidate]:
        """Return the candidates that share a batch with `first` when all candidates together take the least time."""
        count = len(near)
        best = [0.0] * (count + 1)  # least seconds for the first candidates
        begin = [0] * (count + 1)  # index of the first candidate in the last batch of these
        for end in range(1, count + 1):
            longest = near[end - 1]
            length = longest.padded
            most = self.most_rows(longest.bucket, most_rows(longest.bucket))
            rows, start = 0, end
            while start > 0:
                start -= 1
                rows += near[start].rows
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
            together = near[begin[end] : end]
            if first in together:
                return together
            end = begin[end]

    def _seconds(self, rows: int, length: int, most: int) -> float:
        costs = self.costs
        if not costs.is_confident:
            return float(-(-rows // most))  # all have one length, so that fewer batches are better
        if rows <= most:
            return costs.seconds(rows, length)
        full, rest = divmod(rows, most)
        return full * costs.seconds(most, length) + (costs.seconds(rest, length) if rest else 0.0)

    def _would_be_late(self, group: list[Candidate], begins: float) -> bool:
        """Return whether a request of these candidates could miss its deadline in a batch of all of them."""
        deadlines = [candidate.deadline for candidate in group if candidate.deadline is not None]
        if not deadlines:
            return False
        rows = sum([candidate.rows for candidate in group])
        return begins + self.costs.seconds(rows, group[-1].padded) >= min(deadlines)


def _by_length(candidate: Candidate) -> tuple[int, int]:
    return candidate.padded, candidate.length
