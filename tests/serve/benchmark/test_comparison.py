from __future__ import annotations

import pytest

from serve.benchmark.comparison import ComparedLevel, compare
from serve.benchmark.errors import BenchmarkError
from serve.benchmark.level import Level
from serve.benchmark.loads import Load
from tests.serve.benchmark.levels import level

LOAD = Load(concurrency=2)
# Milliseconds per request, by contestant and round; each level has one request in two seconds per latency.
SPEEDS = {0: [4.0, 8.0, 4.0], 1: [2.0, 2.0, 2.0]}


def test_rounds_are_interleaved_and_ratios_are_within_a_round() -> None:
    asked: list[int] = []

    def measure(number: int, load: Load) -> Level:
        asked.append(number)
        latency_ms = SPEEDS[number][asked.count(number) - 1]
        return level(load=load, latencies_ms=[latency_ms] * round(80 / latency_ms))

    first, second = compare(["slow", "fast"], LOAD, 3, measure)
    assert asked == [0, 1, 0, 1, 0, 1]
    assert (first.rate_ratio.median, first.rate_ratio.low, first.rate_ratio.high) == (1, 1, 1)
    assert (second.rate_ratio.median, second.rate_ratio.low, second.rate_ratio.high) == (2, 2, 4)
    assert second.p99_ratio.median == pytest.approx(0.5, rel=1e-3)
    assert second.per_second.median == 20
    assert second.to_json()["rate_ratio"] == {"median": 2, "low": 2, "high": 4}
    assert second.rate_ratio.text == "2.00 (2.00-4.00)"


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), BenchmarkError("the server has gone")])
@pytest.mark.parametrize(("measured", "rounds"), [(0, 0), (1, 0), (2, 1), (5, 2)])
def test_complete_rounds_outlive_what_ends_them(ending: BaseException, measured: int, rounds: int) -> None:
    left = [level(load=LOAD)] * measured

    def measure(number: int, load: Load) -> Level:
        if not left:
            raise ending
        return left.pop()

    kept: list[ComparedLevel] = []
    with pytest.raises(type(ending)):
        kept += compare(["a", "b"], LOAD, 9, measure)
    assert [(one.name, len(one.rounds)) for one in kept] == ([("a", rounds), ("b", rounds)] if rounds else [])


def test_the_base_may_be_another() -> None:
    def measure(number: int, load: Load) -> Level:
        return level(load=load, latencies_ms=[1.0] * (number + 1))

    first, last = compare(["a", "b"], LOAD, 1, measure, base=-1)
    assert (first.rate_ratio.median, last.rate_ratio.median) == (0.5, 1)


def test_failures_and_batches_of_all_rounds_are_told() -> None:
    (one,) = compare(["a"], LOAD, 2, lambda number, load: level(load=load, errors={"INTERNAL": 3}))
    assert (one.failed, one.mean_batch_size) == (6, 4)
    (mute,) = compare(["a"], LOAD, 2, lambda number, load: level(load=load, server=None))
    assert mute.mean_batch_size is None
