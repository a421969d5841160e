"""The search for the settings with the highest throughput within a latency limit.

A model of latency proposes candidates; successive halving keeps the best; from these, one setting at a time is moved while that
helps; the finalists and the settings in force are measured again in turn, and the medians decide. Time is what measurements
have cost, so that a search over recorded measurements takes the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.tuning.batch_model import BatchModel
from halfserve.serve.tuning.settings import Choice, SearchSpace, SettingValue, choice_text

LADDER = tuple(sorted({*(2**n for n in range(11)), *(3 * 2**n for n in range(10))}))  # requests in flight: 1, 2, 3, 4, 6, 8
STRIDE = 2  # rungs of the ladder in one step: a factor of 2
GAIN = 1.02  # a choice is better than another, or than the one in force, from this ratio of throughputs on
SATURATED = 1.03  # more requests in flight that raise the throughput by less are not worth their latency
CANDIDATES = 8
SURVIVORS = 2
NEAR = 0.7  # share of the best throughput from which on choices of another division start a climb of their own
STARTS = 4  # such choices at most
FINALISTS = 3
ROUNDS = 3
LOWERINGS = 4  # loads at which a finalist is measured, each below the one before: by 1, 2 and 4 rungs
FINAL_SHARE = 0.25  # share of the time that the best choices get at the end
MEASUREMENTS = 500  # in the whole time, about; each is so long, within these seconds
SHORTEST_S, LONGEST_S = 0.15, 2.0
FAR = 4.0  # times the limit: more load than reaches this teaches nothing


class RefusedSettingsError(Exception):
    """The server refuses a choice; the text has its reason."""


@dataclass(frozen=True, kw_only=True)
class TuningPoint:
    """One measurement of one choice."""

    choice: Choice
    concurrency: int  # requests in flight
    requests_per_second: float  # successful ones
    latency_ms: float  # at the percentile of the limit
    failed: int = 0  # failed requests
    mean_batch_size: float | None = None  # mean rows of a batch; None if the server does not say
    compute_ms: float | None = None  # mean time of a batch

    def kept(self, limit_ms: float) -> bool:
        """Return whether the limit is kept, without a failed request."""
        return self.failed == 0 and self.latency_ms <= limit_ms


class TunedMachine(Protocol):
    """The machine on which the settings of a model are measured."""

    @property
    def spent_s(self) -> float:
        """Seconds that all measurements have taken so far, with the loads of settings."""
        ...

    def measure(self, choice: Choice, concurrency: int, seconds: float, number: int) -> TuningPoint:
        """Measure; `number` tells repeated measurements apart. Raises RefusedSettingsError."""
        ...


@dataclass(frozen=True, kw_only=True)
class TuningGoal:
    """The limit of the latency, and the time for the search."""

    max_ms: float  # latency limit in milliseconds
    percent: float = 99.0  # percentage of requests that must be within it
    seconds: float = 300.0  # time for the search
    concurrency: int | None = None  # the only load to measure; None to find the highest one for each choice
    rows: int = 1  # rows of a request


@dataclass(frozen=True, kw_only=True)
class TuningOutcome:
    """The result of a search.

    Attributes:
        points: all measurements, in their order.
        start: medians of the choice in force; None if the server refuses it in the end.
        best: medians of the chosen settings, which are those in force unless others are better by `GAIN`; None if no choice
            keeps the limit.
        refused: reasons of refusals, by choice.
        ended_early: whether the time was over before the search was.
    """

    points: Sequence[TuningPoint]
    start: TuningPoint | None
    best: TuningPoint | None
    refused: dict[Choice, str] = field(default_factory=dict)
    ended_early: bool = False

    @property
    def nearest(self) -> TuningPoint:
        """The measurement with the lowest latency."""
        return min(self.points, key=lambda point: (point.failed > 0, point.latency_ms))

    def front(self) -> list[TuningPoint]:
        """Return the Pareto front: points that no other point exceeds in throughput at a latency as low, by rising latency."""
        found: list[TuningPoint] = []
        for point in sorted(self.points, key=lambda one: (one.latency_ms, -one.requests_per_second)):
            if not point.failed and (not found or point.requests_per_second > found[-1].requests_per_second):
                found.append(point)
        return found


class TuningSearch:
    """One search; `say` gets a line whenever something better was found."""

    def __init__(
        self, space: SearchSpace, machine: TunedMachine, goal: TuningGoal, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._space = space
        self._machine = machine
        self._goal = goal
        self._say = say
        self._model = BatchModel()
        self._points: list[TuningPoint] = []
        self._best: dict[Choice, TuningPoint] = {}  # the best point of each measured choice
        self._longest: dict[Choice, float] = {}  # seconds of a measurement of each choice, the last time
        self._refused: dict[Choice, str] = {}
        self._shown = 0.0  # requests per second of the last line
        self.window_s = min(LONGEST_S, max(SHORTEST_S, goal.seconds / MEASUREMENTS))  # length of the shortest measurements

    def run(self) -> TuningOutcome:
        """Search. Raises BenchmarkError: the server refuses the settings in force."""
        start = self._space.start
        self._learn()
        self.try_choice(start, self.window_s)
        if start in self._refused:
            raise BenchmarkError(f"the server refuses the settings in force: {self._refused[start]}")
        seconds = self.window_s
        candidates = list(dict.fromkeys([start, *self._proposed()]))[:CANDIDATES]
        while len(candidates) > SURVIVORS and not self._is_over():
            for choice in candidates:
                self.try_choice(choice, seconds)
            candidates = self.ranked(candidates)[: max(SURVIVORS, len(candidates) // 2)]
            seconds *= 2 if len(candidates) > SURVIVORS else 1
        seconds = self.window_s
        for choice in self._starts():
            self._climb(choice, seconds)
        before: list[Choice] = []
        while not self._is_over() and (ranked := self.ranked(self._best)[:SURVIVORS]) != before and seconds <= LONGEST_S:
            for choice in ranked:
                self._climb(choice, seconds)
            # Longer measurements, as long as they change which choices are the best.
            before, seconds = ranked, seconds * 2
        ended_early = self._is_over()
        ranked = [choice for choice in self.ranked(self._best) if self._keeps(self._best[choice])]
        contenders = self.in_turn([*dict.fromkeys([*ranked[:FINALISTS], start])] if ranked else [])
        in_force = contenders.get(start, self._best.get(start))
        best = max(filter(self._keeps, contenders.values()), key=self._rank, default=None)
        if best and in_force and self._keeps(in_force) and not self._beats(best, in_force):
            best = in_force
        return TuningOutcome(points=self._points, start=in_force, best=best, refused=self._refused, ended_early=ended_early)

    def try_choice(self, choice: Choice, seconds: float) -> None:
        """Find the highest load of a choice within the limit, by measurements of `seconds`, unless it is known."""
        is_known = choice in self._refused or self._longest.get(choice, 0.0) >= seconds
        if is_known or (self._best and self._is_over()):
            return
        self._longest[choice] = seconds
        try:
            point = self._highest(choice, seconds)
        except RefusedSettingsError as error:
            self._refused[choice] = str(error)
            self._best.pop(choice, None)
            return
        self._best[choice] = point
        if self._keeps(point) and point.requests_per_second > self._shown:
            self._shown = point.requests_per_second
            self._say(f"{point.requests_per_second:,.0f} requests/s, {point.latency_ms:.2f} ms: {choice_text(choice)}")

    def in_turn(self, choices: Sequence[Choice]) -> dict[Choice, TuningPoint]:
        """Measure choices that were tried, in turn, and return the medians; one that misses the limit gets less load."""
        loads = {choice: self._best[choice].concurrency for choice in self.ranked(choices)}
        left_s = max(self._goal.seconds - self._machine.spent_s, self._goal.seconds * FINAL_SHARE / 2)
        seconds = min(LONGEST_S, max(self.window_s, left_s / (2 * ROUNDS * max(1, len(loads)))))
        found: dict[Choice, TuningPoint] = {}
        for lowering in range(LOWERINGS):
            rounds: dict[Choice, list[TuningPoint]] = {choice: [] for choice in loads}
            for number in range(1, ROUNDS + 1):
                if number > 1 and self._machine.spent_s > self._goal.seconds:
                    break
                for choice, concurrency in loads.items():
                    try:
                        rounds[choice].append(self._measured(choice, concurrency, seconds, number))
                    except RefusedSettingsError as error:
                        self._refused[choice] = str(error)
            found |= {choice: _medians(points) for choice, points in rounds.items() if points}
            missed = [choice for choice in loads if choice in found and not self._keeps(found[choice])]
            if self._goal.concurrency or (self._machine.spent_s > self._goal.seconds and len(missed) < len(found)):
                break
            rungs = {choice: LADDER.index(loads[choice]) for choice in missed}
            loads = {choice: LADDER[max(0, rung - 2**lowering)] for choice, rung in rungs.items() if rung}
        return found

    def ranked(self, choices: Iterable[Choice]) -> list[Choice]:
        """Return the choices that were tried, the best first."""
        known = [choice for choice in choices if choice in self._best]
        return sorted(known, key=lambda choice: self._rank(self._best[choice]), reverse=True)

    def _learn(self) -> None:
        """Measure one copy with the largest batches and each number of threads, under rising load."""
        if len(self._space.models) > 1 or self._goal.concurrency is not None:
            return
        base = self._space.start
        axes = {axis.name: axis for axis in self._space.axes}
        for name, pick in (("instances", min), ("max_batch_size", max), ("delay_us", min)):
            base = axes[name].set(base, pick(axes[name].values)) if name in axes else base
        choices = [axes["threads"].set(base, value) for value in axes["threads"].values] if "threads" in axes else [base]
        for choice in choices:
            for in_flight in (1, 8, 64):
                if not self._space.allows(choice) or self._is_over():
                    break
                try:
                    point = self._measured(choice, in_flight, self.window_s)
                except RefusedSettingsError as error:
                    self._refused[choice] = str(error)
                    break
                if point.latency_ms > FAR * self._goal.max_ms:
                    break

    def _proposed(self) -> list[Choice]:
        """Return the choices with the highest predicted throughput, one for each division of the cores first."""
        if len(self._space.models) > 1:
            return []
        predicted: dict[Choice, tuple[float, float]] = {}
        for choice in self._space.all():
            if found := self._model.predict(choice[0], self._goal.max_ms):
                # Of choices with the same prediction, the one with the shortest delay and the smallest batch is tried first.
                predicted[choice] = -found[0], choice[0].delay_us + choice[0].max_batch_size
        ordered = sorted(predicted, key=lambda choice: predicted[choice])
        first: dict[tuple[SettingValue, ...], Choice] = {}
        for choice in ordered:
            first.setdefault(choice[0].division, choice)
        return list(dict.fromkeys([*first.values(), *ordered]))

    def _starts(self) -> list[Choice]:
        """Return the best choice of each division of the cores, padding and precision: no single move leads between them."""
        first: dict[tuple[object, ...], Choice] = {}
        ranked = self.ranked(self._best)
        for choice in ranked:
            if self._best[choice].requests_per_second >= NEAR * self._best[ranked[0]].requests_per_second:
                first.setdefault(tuple(settings.division for settings in choice), choice)
        return list(first.values())[:STARTS]

    def _climb(self, choice: Choice, seconds: float) -> None:
        """Move one setting at a time by one place, as long as that is better."""
        self.try_choice(choice, seconds)
        here, improved = choice, True
        while improved:
            improved = False
            for other in [*self._filled(here), *self._space.neighbours(here)]:
                if self._is_over():
                    return
                self.try_choice(other, seconds)
                if other in self._best and here in self._best and self._beats(self._best[other], self._best[here]):
                    here, improved = other, True
                    break

    def _filled(self, choice: Choice) -> list[Choice]:
        """Return the choice with the smallest batch that holds the rows of its batches: a full one need not wait for more."""
        rows = self._best[choice].mean_batch_size if len(choice) == 1 and choice in self._best else None
        batches = next((axis for axis in self._space.axes if axis.name == "max_batch_size"), None)
        if rows is None or batches is None:
            return []
        found = [batches.set(choice, value) for value in batches.values if int(value) >= round(rows)][:1]
        return [one for one in found if one != choice and self._space.allows(one)]

    def _highest(self, choice: Choice, seconds: float) -> TuningPoint:
        """Measure from the load that is expected to be the highest within the limit, up or down the ladder."""
        if self._goal.concurrency is not None:
            return self._measured(choice, self._goal.concurrency, seconds)
        tried: dict[int, TuningPoint] = {}

        def at(rung: int) -> TuningPoint:
            if rung not in tried:
                tried[rung] = self._measured(choice, LADDER[rung], seconds)
            return tried[rung]

        first = rung = self._first_rung(choice)
        point = at(rung)
        if self._keeps(point):
            while rung + STRIDE < len(LADDER):
                higher = at(rung + STRIDE)
                if not self._keeps(higher) or higher.requests_per_second < SATURATED * point.requests_per_second:
                    break
                rung, point = rung + STRIDE, higher
        else:
            while rung > 0 and not self._keeps(point):
                rung = max(0, rung - STRIDE)
                point = at(rung)
        if self._keeps(point):
            for beside in (rung + 1, rung - 1) if rung == first else (rung + 1,):
                at(max(0, min(beside, len(LADDER) - 1)))
        return max(tried.values(), key=self._rank)

    def _first_rung(self, choice: Choice) -> int:
        """Return the rung of the load to begin with: of an earlier measurement, the prediction, or the best choice so far."""
        wanted = 2.0 * max(1, choice[0].max_batch_size // self._goal.rows)
        predicted = self._model.predict(choice[0], self._goal.max_ms) if len(choice) == 1 else None
        if choice in self._best:
            wanted = self._best[choice].concurrency
        elif predicted is not None:
            wanted = max(1.0, predicted[1] / self._goal.rows)
        elif (best := max(self._best.values(), key=self._rank, default=None)) and self._keeps(best):
            wanted = best.concurrency
        return min(range(len(LADDER)), key=lambda rung: abs(math.log(LADDER[rung] / wanted)))

    def _measured(self, choice: Choice, concurrency: int, seconds: float, number: int = 0) -> TuningPoint:
        point = self._machine.measure(choice, concurrency, seconds, number)
        self._points.append(point)
        if len(choice) == 1:
            self._model.learn(choice[0], point.mean_batch_size, point.compute_ms)
        return point

    def _keeps(self, point: TuningPoint) -> bool:
        return point.kept(self._goal.max_ms)

    def _rank(self, point: TuningPoint) -> tuple[bool, float]:
        return (True, point.requests_per_second) if self._keeps(point) else (False, -point.latency_ms)

    def _beats(self, one: TuningPoint, other: TuningPoint) -> bool:
        if self._keeps(one) and self._keeps(other):
            return one.requests_per_second >= GAIN * other.requests_per_second
        return self._rank(one) > self._rank(other)

    def _is_over(self) -> bool:
        return self._machine.spent_s >= self._goal.seconds * (1 - FINAL_SHARE)


def _medians(points: Sequence[TuningPoint]) -> TuningPoint:
    return replace(
        points[0],
        requests_per_second=median(point.requests_per_second for point in points),
        latency_ms=median(point.latency_ms for point in points),
        failed=sum(point.failed for point in points),
    )
