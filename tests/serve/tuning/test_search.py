"""The search on a machine whose best settings are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.tuning.search import TuningGoal, TuningOutcome, TuningPoint, TuningSearch
from halfserve.serve.tuning.settings import SearchSpace, TunedAxis, TunedSettings
from tests.serve.tuning.synthetic_machine import SyntheticMachine, space_of

MACHINES = {
    "long batches": SyntheticMachine(fixed_ms=5, row_ms=0.05, parallel=0.9),
    "short batches": SyntheticMachine(fixed_ms=0.05, row_ms=0.05),
    "rows that cost": SyntheticMachine(fixed_ms=0.2, row_ms=2, parallel=0.95),
    "threads that help little": SyntheticMachine(fixed_ms=0.5, row_ms=0.1, parallel=0.2),
    "copies in each other's way": SyntheticMachine(fixed_ms=2, row_ms=0.02, crowding=0.5),
}
STARTS = {"usual": TunedSettings(max_batch_size=32), "no batches": TunedSettings(instances=4, threads=1, max_batch_size=1)}


def searched(machine: SyntheticMachine, space: SearchSpace, goal: TuningGoal) -> tuple[TuningOutcome, SyntheticMachine]:
    fresh = replace(machine, spent_s=0.0, measured=[], _random=np.random.default_rng(7))  # the same noise in any order
    return TuningSearch(space, fresh, goal).run(), fresh


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("limit_ms", [3.0, 10.0, 50.0])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", MACHINES)
def test_finds_what_trying_everything_finds(name: str, start: str, limit_ms: float, noise: float) -> None:
    space = space_of(start=STARTS[start])
    outcome, machine = searched(replace(MACHINES[name], noise=noise), space, TuningGoal(max_ms=limit_ms))
    choices = list(space.all())
    best = max(machine.best_rate(choice, limit_ms) for choice in choices)
    if not best:
        assert outcome.best is None
        return
    assert outcome.best is not None
    # A noisy machine may show a latency just above the limit as within it.
    assert machine.best_rate(outcome.best.choice, limit_ms * (1 + noise)) >= 0.95 * best
    assert len({choice for choice, *_ in machine.measured}) < len(choices) / 3
    assert machine.spent_s < 330


def test_no_settings_within_the_limit_show_the_nearest() -> None:
    outcome, machine = searched(MACHINES["long batches"], space_of(), TuningGoal(max_ms=0.5))
    assert outcome.best is None
    assert outcome.nearest.latency_ms == min(point.latency_ms for point in outcome.points)
    assert machine.spent_s < 300


def test_settings_in_force_that_are_as_good_stay() -> None:
    found, machine = searched(MACHINES["long batches"], space_of(), TuningGoal(max_ms=50))
    assert found.best is not None
    again, _ = searched(machine, replace(space_of(), start=found.best.choice), TuningGoal(max_ms=50))
    assert again.best is not None
    assert again.best.choice == found.best.choice


def test_refused_settings_are_passed_over() -> None:
    outcome, _ = searched(replace(MACHINES["long batches"], refused_above=48), space_of(), TuningGoal(max_ms=50))
    assert outcome.best is not None
    assert outcome.best.choice[0].max_batch_size <= 48
    assert {choice[0].max_batch_size for choice in outcome.refused} <= {64, 128}


def test_refused_settings_in_force_are_an_error() -> None:
    with pytest.raises(BenchmarkError, match="refuses the settings in force: batches of 32 rows do not fit"):
        searched(replace(MACHINES["long batches"], refused_above=16), space_of(), TuningGoal(max_ms=50))


def test_little_time_ends_the_search_early_with_a_result() -> None:
    outcome, machine = searched(MACHINES["long batches"], space_of(), TuningGoal(max_ms=50, seconds=5))
    assert outcome.ended_early
    assert outcome.best is not None
    assert machine.spent_s < 10


def test_at_a_load_of_interest_nothing_else_is_measured() -> None:
    goal = TuningGoal(max_ms=50, concurrency=16)
    outcome, machine = searched(MACHINES["long batches"], space_of(), goal)
    assert {concurrency for _, concurrency, *_ in machine.measured} == {16}
    assert outcome.best is not None
    best = max(machine.exact(choice[0], 16)[0] for choice in space_of().all())
    assert machine.exact(outcome.best.choice[0], 16)[0] >= 0.95 * best


class TwoSteps:
    """An ensemble of two steps: the slower one limits the throughput."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._steps = (SyntheticMachine(fixed_ms=1, row_ms=0.05), SyntheticMachine(fixed_ms=2, row_ms=0.02, crowding=0.4))

    def exact(self, choice: tuple[TunedSettings, ...], in_flight: int) -> tuple[float, float]:
        figures = [step.exact(settings, in_flight) for step, settings in zip(self._steps, choice, strict=True)]
        return min(rate for rate, *_ in figures), sum(mean_ms for _, mean_ms, _ in figures)

    def measure(self, choice: tuple[TunedSettings, ...], concurrency: int, seconds: float, number: int) -> TuningPoint:
        self.spent_s += seconds
        rate, latency_ms = self.exact(choice, concurrency)
        return TuningPoint(choice=choice, concurrency=concurrency, requests_per_second=rate, latency_ms=latency_ms)


def test_the_steps_of_an_ensemble_are_tuned_together() -> None:
    batches, copies = (1, 4, 16, 64), (1, 2, 4)
    axes = [TunedAxis(model=step, name="max_batch_size", values=batches) for step in range(2)]
    axes += [TunedAxis(model=step, name="instances", values=copies) for step in range(2)]
    start = (TunedSettings(threads=1, max_batch_size=4), TunedSettings(threads=1, max_batch_size=4))
    space = SearchSpace(models=("one", "two"), axes=tuple(axes), start=start, cores=4)
    machine = TwoSteps()
    outcome = TuningSearch(space, machine, TuningGoal(max_ms=20)).run()
    figures = [machine.exact(choice, in_flight) for choice in space.all() for in_flight in (1, 2, 4, 8, 16, 32, 48, 64)]
    assert outcome.best is not None
    assert outcome.best.requests_per_second >= 0.95 * max(rate for rate, latency_ms in figures if latency_ms <= 20)


def test_the_front_has_no_point_that_another_exceeds() -> None:
    outcome, _ = searched(MACHINES["short batches"], space_of(), TuningGoal(max_ms=10))
    front = outcome.front()
    assert front
    for point in front:
        assert not any(
            one.requests_per_second > point.requests_per_second and one.latency_ms <= point.latency_ms for one in outcome.points
        )
