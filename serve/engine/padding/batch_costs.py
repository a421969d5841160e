"""Predicts the duration of a batch from its rows and length, learned from measured batches. Pure.

A batch of n tokens (rows times length) of a transformer takes a + b * n + c * n * length seconds: a fixed cost, the products
with weights, and attention. If a small batch does not fill a device, a is large. The fit uses relative least squares, so that
long batches do not dominate short ones, with exponential forgetting and no negative term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
    """Learns the duration of one model's batches.

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
