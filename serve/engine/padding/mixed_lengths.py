"""Chooses which waiting requests of different lengths share a batch. Pure.

Padding a request costs the time to compute its empty places; a batch of its own has the fixed cost of a batch. So the waiting
lengths, in order, are divided into the groups that take the least time together, by the batch costs so far, and the group with
the most urgent request is the next batch. No request is passed over: the most urgent one is always in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from halfserve.serve.engine.padding.padding import Padding

KEEP: Final = 0.98  # factor on the weight of all batches when the next one comes
SEED_WEIGHT: Final = 2.0  # permanent weight of each batch that was measured before the model served
LEVEL_SHARE: Final = 1 / 16  # weight of a new batch in the ratio of present times to those of the seed
STRAY: Final = 4.0  # a batch counts for at most this multiple of the expected time, and at least this fraction
CONFIDENT: Final = 16  # number of batches before it predicts, without a seed
SPREAD: Final = 2.0  # least ratio of the tokens of the largest and the smallest batch among them
REFRESH: Final = 4  # number of batches from one fit to the next
TOKENS: Final = 64.0  # unit of the second and third term, so that all have similar sizes
LENGTH: Final = 64.0
BATCH_S: Final = 200e-6  # added to any batch's measured time: the way to its thread and back, and the way of its answers out
Measured = tuple[int, int, float]  # rows, length, seconds
NEAR: Final = 48  # lengths to consider on each side of the most urgent request's
GAIN: Final = 0.02  # part by which a shared batch must be cheaper, because predictions are not exact


class _Sums:
    """Normal equations of a relative least-squares fit of three terms: the upper triangle and the right side."""

    __slots__ = ("matrix", "right")

    def __init__(self) -> None:
        self.matrix = [0.0] * 6
        self.right = [0.0] * 3

    def forget(self) -> None:
        self.matrix = [KEEP * entry for entry in self.matrix]
        self.right = [KEEP * entry for entry in self.right]

    def add(self, rows: int, length: int, seconds: float, weight: float = 1.0) -> None:
        """Add one batch. Each equation is divided by its `seconds`, so that errors are relative."""
        tokens = rows * length / TOKENS
        x, y, z = 1.0 / seconds, tokens / seconds, tokens * (length / LENGTH) / seconds
        matrix, right = self.matrix, self.right
        for place, entry in enumerate((x * x, x * y, x * z, y * y, y * z, z * z)):
            matrix[place] += weight * entry
        for place, entry in enumerate((x, y, z)):
            right[place] += weight * entry


class BatchCosts:
    """Learns the duration of one model's batches, by their rows and length.

    A batch of n tokens (rows times length) of a transformer takes a + b * n + c * n * length seconds: a fixed cost, the
    products with weights, and attention. If a small batch does not fill a device, a is large. The fit uses relative least
    squares, so that long batches do not dominate short ones, with exponential forgetting and no negative term.

    Attributes:
        batches: number of batches observed while the model serves.
    """

    __slots__ = ("_least", "_level", "_most", "_seed", "_seeded", "_sums", "_terms", "batches")

    def __init__(self, seed: Sequence[Measured] = ()) -> None:
        """`seed`: batches that were measured before the model served."""
        self.batches = 0
        self._seed = _Sums()
        self._seeded = len(seed) >= 3
        for rows, length, seconds in seed:
            self._seed.add(rows, length, max(1e-7, seconds), SEED_WEIGHT)
        self._level = 1.0  # ratio of present batch times to those of the seed
        self._sums = _Sums()
        self._least, self._most = 0, 0  # in tokens
        self._terms = (0.0, 0.0, 0.0)
        if self._seeded:
            self._fit()

    @property
    def is_confident(self) -> bool:
        """Whether it can predict."""
        return self._seeded or (self.batches >= CONFIDENT and self._most >= SPREAD * self._least)

    def seconds(self, rows: int, length: int) -> float:
        """Return the expected seconds of a batch, including its way there and back. Only meaningful once confident."""
        tokens = rows * length / TOKENS
        a, b, c = self._terms
        return BATCH_S + a + tokens * (b + c * (length / LENGTH))

    def observe(self, rows: int, length: int, seconds: float) -> None:
        """Learn from a batch that took `seconds`."""
        seconds = max(1e-7, seconds)
        if self.is_confident:
            expected = max(1e-7, self.seconds(rows, length) - BATCH_S)
            seconds = min(max(seconds, expected / STRAY), expected * STRAY)
            # The terms include the level, so that the ratio learned here is a change of it.
            self._level *= 1.0 + LEVEL_SHARE * (seconds / expected - 1.0)
        self._sums.forget()
        self._sums.add(rows, length, seconds)
        tokens = rows * length
        self._least, self._most = min(self._least or tokens, tokens), max(self._most, tokens)
        self.batches += 1
        if self.batches % REFRESH == 0:
            self._fit()

    def _fit(self) -> None:
        level = self._level
        matrix = [own + seed / (level * level) for own, seed in zip(self._sums.matrix, self._seed.matrix, strict=True)]
        right = [own + seed / level for own, seed in zip(self._sums.right, self._seed.right, strict=True)]
        used = [True, True, True]
        while any(used):
            terms = _solved(matrix, right, used)
            lowest = min(terms)
            if lowest >= 0.0:
                self._terms = (terms[0], terms[1], terms[2])
                return
            used[terms.index(lowest)] = False


def _solved(upper: Sequence[float], right: Sequence[float], used: Sequence[bool]) -> list[float]:
    """Solve the normal equations for the used terms by elimination; the other terms are 0."""
    full = [
        [upper[0], upper[1], upper[2]],
        [upper[1], upper[3], upper[4]],
        [upper[2], upper[4], upper[5]],
    ]
    places = [place for place in range(3) if used[place]]
    # Terms that batches of one shape cannot distinguish get a little weight of their own.
    rows = [[full[i][j] * (1.0 + 1e-9 if i == j else 1.0) for j in places] + [right[i]] for i in places]
    count = len(places)
    for pivot in range(count):
        head = rows[pivot][pivot]
        if head <= 0.0:
            continue
        for below in range(pivot + 1, count):
            factor = rows[below][pivot] / head
            for column in range(pivot, count + 1):
                rows[below][column] -= factor * rows[pivot][column]
    terms = [0.0, 0.0, 0.0]
    for pivot in range(count - 1, -1, -1):
        head = rows[pivot][pivot]
        rest = rows[pivot][count]
        for column in range(pivot + 1, count):
            rest -= rows[pivot][column] * terms[places[column]]
        terms[places[pivot]] = rest / head if head > 0.0 else 0.0
    return terms


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
