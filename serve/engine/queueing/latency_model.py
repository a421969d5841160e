"""How long a batch takes, learned from those that ran: a fixed part and a part per row. Pure: it is told what time it was.

Seconds are fitted as `a + b * rows` by least squares over sums that forget: each batch weighs 1 % less than the one after it.
How far batches stray from the line is kept as the ratios of the latest ones, measured over fitted, and read off by rank: that
is robust against the odd batch that took ten times as long, which a standard deviation is not.
"""

from __future__ import annotations

from collections import deque

KEEP = 0.99  # of a batch's weight, when the next one comes
RATIOS = 256  # of the latest batches
REFRESH = 32  # batches until the ratios are sorted anew
STRAY = 4.0  # a batch counts for no more than so many times what was expected, nor for less than that part
OFF, OFF_IN_A_ROW = 2.0, 8  # so many batches in a row that take twice as long, or half, and it begins anew
CONFIDENT = 16  # batches before anything is foretold
SAFE_RANK, FAIR_RANK = 0.99, 0.9


class LatencyModel:
    """Fitted online for one bucket.

    Attributes:
        batches: that it has seen.
        fixed_s: seconds of any batch; 0 until `is_confident`.
        per_row_s: seconds of each of its rows.
        safe: what all but 1 % of the batches stay below, as a multiple of the fitted time; at least 1.
        fair: what all but 10 % stay below.
    """

    __slots__ = ("_n", "_nn", "_nt", "_off", "_ratios", "_t", "_weight", "batches", "fair", "fixed_s", "per_row_s", "safe")

    def __init__(self) -> None:
        self.batches = 0
        self.fixed_s = self.per_row_s = 0.0
        self.safe = self.fair = 1.0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self._off = 0
        self._ratios: deque[float] = deque(maxlen=RATIOS)

    @property
    def is_confident(self) -> bool:
        """Whether it has seen enough to foretell."""
        return self.batches >= CONFIDENT

    def observe(self, rows: int, seconds: float, *, happened_before: bool = False) -> None:
        """Learn from a batch of `rows` rows that took `seconds`.

        `happened_before`: what made it stray made another one stray at that time too, and says no more of how often that is.
        """
        if self.batches >= CONFIDENT // 2:
            fitted = max(1e-9, self._fitted(rows))
            if self._is_new(seconds / fitted):
                self._begin_anew(rows, seconds)
                return
            if not (happened_before and self._ratios):
                self._ratios.append(seconds / fitted)
            # What strays by more is a hiccup, or the start of something new, which the next batches will confirm.
            seconds = min(max(seconds, fitted / STRAY), fitted * STRAY)
        self._weight = self._weight * KEEP + 1.0
        self._n = self._n * KEEP + rows
        self._nn = self._nn * KEEP + rows * rows
        self._t = self._t * KEEP + seconds
        self._nt = self._nt * KEEP + rows * seconds
        self.batches += 1
        self._fit()
        if self.batches % REFRESH == 0 or self.batches == CONFIDENT:
            ranked = sorted(self._ratios)
            most = len(ranked) - 2  # one odd batch is not to stand for all, where there are less than a hundred
            self.safe, self.fair = (max(1.0, ranked[min(int(rank * len(ranked)), most)]) for rank in (SAFE_RANK, FAIR_RANK))

    def _is_new(self, ratio: float) -> bool:
        """Whether so many batches in a row strayed in one direction that what was learned does not hold any more."""
        sign = 1 if ratio > OFF else -1 if ratio < 1 / OFF else 0
        self._off = self._off + sign if sign and sign * self._off >= 0 else sign
        return abs(self._off) >= OFF_IN_A_ROW

    def _begin_anew(self, rows: int, seconds: float) -> None:
        self.batches = self._off = 0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0
        self._ratios.clear()
        self.safe = self.fair = 1.0
        self.observe(rows, seconds)

    def likely_s(self, rows: int) -> float:
        """Seconds that a batch should take; 0 as long as that is a guess."""
        return self._fitted(rows) if self.batches >= CONFIDENT else 0.0

    def at_most_s(self, rows: int) -> float:
        """Seconds that all but 1 % of such batches stay below; 0 as long as that is a guess."""
        return self.likely_s(rows) * self.safe

    def mostly_s(self, rows: int) -> float:
        """Seconds that all but 10 % of such batches stay below; 0 as long as that is a guess."""
        return self.likely_s(rows) * self.fair

    def most_rows(self, seconds: float, limit: int) -> int:
        """The largest batch, of 1 to `limit` rows, that takes at most `seconds`, but for 1 %; `limit` while that is a guess."""
        left = seconds / self.safe - self.fixed_s
        if not self.is_confident or left >= self.per_row_s * limit:
            return limit
        return max(1, int(left / self.per_row_s)) if left > 0 else 1

    def _fitted(self, rows: int) -> float:
        return self.fixed_s + self.per_row_s * rows

    def _fit(self) -> None:
        """Least squares under a >= 0 and b >= 0: a batch never costs less than nothing, nor less for a row more.

        The bounds also keep what was never seen sane: fewer rows than usual cost between their share and all of the usual time,
        more rows between the usual time and their share.
        """
        spread = self._weight * self._nn - self._n * self._n
        # All of one size: nothing tells the parts apart, and by the share is the safe guess for larger batches.
        slope = self._nt / self._nn if spread <= 1e-9 * self._n * self._n else self._slope(spread)
        self.per_row_s = slope
        self.fixed_s = max(0.0, (self._t - slope * self._n) / self._weight)

    def _slope(self, spread: float) -> float:
        slope = (self._weight * self._nt - self._n * self._t) / spread
        if slope <= 0:
            return 0.0
        through_zero = self._nt / self._nn
        return slope if self._t >= slope * self._n else through_zero
