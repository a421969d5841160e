"""Servers or models side by side: one is loaded at a time, A B A B ..., so that a drift in the machine's speed falls on all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve.benchmark.level import Level
from serve.benchmark.loads import Load

MeasureOne = Callable[[int, Load], Level]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over the rounds: its median, and the smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """From one value per round."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    @property
    def text(self) -> str:
        """As it is printed: "1.31 (1.24-1.40)"."""
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, kw_only=True)
class ComparedLevel:
    """What one contestant did under one load.

    Attributes:
        name: the contestant's.
        load: what was asked for.
        rounds: one level per round.
        per_second: requests answered with success per second.
        p50_ms: median latency.
        p99_ms: latency that 99 % do not pass.
        rate_ratio: requests per second over the base's in the same round.
        p99_ratio: the same of p99.
    """

    name: str
    load: Load
    rounds: Sequence[Level]
    per_second: Spread
    p50_ms: Spread
    p99_ms: Spread
    rate_ratio: Spread
    p99_ratio: Spread

    @property
    def mean_batch_size(self) -> float | None:
        """Rows per batch, the median over the rounds; None where the server does not say."""
        sizes = [level.server.mean_batch_size for level in self.rounds if level.server and level.server.mean_batch_size]
        return statistics.median(sizes) if sizes else None

    @property
    def failed(self) -> int:
        """Requests that failed, in all rounds."""
        return sum(level.failed for level in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The object of bench.json's "comparison"; see serve/benchmark/reports/report.py."""
        return {
            "name": self.name,
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "requests_per_second": vars(self.per_second),
            "p50_ms": vars(self.p50_ms),
            "p99_ms": vars(self.p99_ms),
            "rate_ratio": vars(self.rate_ratio),
            "p99_ratio": vars(self.p99_ratio),
            "mean_batch_size": self.mean_batch_size,
            "errors": self.failed,
            "rounds": [level.to_json() for level in self.rounds],
        }


def compare(names: Sequence[str], load: Load, rounds: int, measure: MeasureOne, *, base: int = 0) -> Iterator[ComparedLevel]:
    """Measure all contestants under one load, in turn, and compare each with one of them.

    Args:
        names: of the contestants.
        load: the same for all.
        rounds: how often each is measured.
        measure: measures the contestant of a number.
        base: the number of the one that the others are compared with.

    Raises:
        BaseException: what `measure` has raised, after what the rounds before it give.
    """
    complete: list[list[Level]] = []
    try:
        for _ in range(rounds):
            complete.append([measure(number, load) for number in range(len(names))])  # noqa: PERF401  (kept if one fails)
    except BaseException:
        yield from _over_rounds(names, complete, base)
        raise
    yield from _over_rounds(names, complete, base)


def _over_rounds(names: Sequence[str], complete: Sequence[Sequence[Level]], base: int) -> Iterator[ComparedLevel]:
    levels = list(zip(*complete, strict=True))
    for name, measured in zip(names, levels, strict=False):  # without any round there are no levels
        yield compared(name, measured, levels[base])


def compared(name: str, levels: Sequence[Level], base: Sequence[Level]) -> ComparedLevel:
    """One contestant's rounds beside the base's."""
    pairs = list(zip(levels, base, strict=True))
    return ComparedLevel(
        name=name,
        load=levels[0].load,
        rounds=levels,
        per_second=Spread.of([level.requests_per_second for level in levels]),
        p50_ms=Spread.of([level.latency.p50 for level in levels]),
        p99_ms=Spread.of([level.latency.p99 for level in levels]),
        rate_ratio=Spread.of([level.requests_per_second / other.requests_per_second for level, other in pairs]),
        p99_ratio=Spread.of([level.latency.p99 / other.latency.p99 for level, other in pairs]),
    )
