"""Measure one load after the other, or look for the highest that keeps its latency."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.level import Level
from serve.benchmark.loads import Load

Measure = Callable[[Load], Level]

RESOLUTION = 0.05  # of a rate; numbers of requests in flight are found exactly
MAX_DOUBLINGS = 20
ATTEMPTS = 2


def sweep(loads: Sequence[Load], measure: Measure) -> Iterator[Level]:
    """Each load in its order."""
    for load in loads:
        yield measure(load)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A latency to keep.

    Attributes:
        percent: of the requests that have to keep it.
        max_ms: the latency.
    """

    percent: float
    max_ms: float

    def kept_by(self, level: Level) -> bool:
        """Whether it was kept: no request may have failed, and a request that was not sent has not been answered in time."""
        return level.failed == 0 and level.ended_early is None and level.percentile_ms(self.percent) <= self.max_ms

    @property
    def text(self) -> str:
        """As it is said."""
        return f"p{self.percent:g} within {self.max_ms:g} ms"


def search(loads: Sequence[Load], goal: Goal, measure: Measure) -> Iterator[Level]:
    """Look for the highest load that keeps a goal, from the lowest to the highest of `loads`.

    A single load is where the search starts: it is doubled until it fails. Then the gap between what keeps the goal and what
    does not is halved until it is one request in flight, or a twentieth of the rate. Yields every level as it is measured.

    Raises:
        BenchmarkError: the lowest load does not keep the goal.
    """
    lowest = min(loads, key=lambda load: load.amount)
    highest = max(loads, key=lambda load: load.amount)
    kept = yield from _tried(lowest, goal, measure)
    if not kept:
        raise BenchmarkError(f"even {lowest.text} does not keep {goal.text}")
    good, bad = lowest, None
    limit = highest.amount if len(loads) > 1 else lowest.amount * 2**MAX_DOUBLINGS
    while bad is None and good.amount < limit:
        tried = _scaled(good, min(good.amount * 2, limit))
        kept = yield from _tried(tried, goal, measure)
        good, bad = (tried, None) if kept else (good, tried)
    while bad is not None and _apart(good, bad):
        tried = _scaled(good, (good.amount + bad.amount) / 2)
        kept = yield from _tried(tried, goal, measure)
        good, bad = (tried, bad) if kept else (good, tried)


def _tried(load: Load, goal: Goal, measure: Measure) -> Generator[Level, None, bool]:
    """Whether a load keeps the goal; it gets a second chance, since a hiccup of the machine is no limit of the server."""
    for _ in range(ATTEMPTS):
        level = measure(load)
        yield level
        if goal.kept_by(level):
            return True
    return False


def best_of(levels: Sequence[Level], goal: Goal) -> Level | None:
    """The level with the highest load that keeps the goal; None where none does."""
    keeping = [level for level in levels if goal.kept_by(level)]
    return max(keeping, key=lambda level: level.load.amount, default=None)


def _scaled(load: Load, amount: float) -> Load:
    return Load(concurrency=int(amount)) if load.rate is None else Load(rate=amount)


def _apart(good: Load, bad: Load) -> bool:
    gap = bad.amount - good.amount
    return gap > 1 if good.rate is None else gap > RESOLUTION * good.amount
