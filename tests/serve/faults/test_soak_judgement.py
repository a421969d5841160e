"""The judgement of a soak, tried on recorded servers with and without leaks."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.process_watch import Sample
from tests.serve.faults.soaking.judgement import SETTLED_AFTER, Report, judge_memory, report, rise
from tests.serve.faults.soaking.tally import Counted

SECONDS = 120.0
# Samples of soaks like tests/end_to_end/test_soak.py, thinned out: on a machine with other work, with three programs
# besides that never wait, with many reloads (300 s), and of servers that were spoilt to leak.
RECORDED = Path(__file__).parent / "recorded"


def soaked(
    *,
    mb_per_hour: float = 0.0,
    saw_mb: float = 0.0,
    leaps_mb: float = 0.0,
    slower: float = 1.0,
    fastest_too: bool = True,
    works_more: bool = True,
    log: str = "",
) -> Report:
    times = np.arange(0.0, SECONDS, 0.25)
    leaps = leaps_mb * ((times > 60).astype(float) + (times > 100))
    memory = 100 + mb_per_hour * times / 3600 + saw_mb * (times % 37) / 37 + leaps
    late = times > SECONDS / 2
    held_up = late if fastest_too else late & (np.arange(len(times)) % 4 > 0)
    cpu_s = np.cumsum(np.where(late & works_more, 0.001 * slower, 0.001))
    samples = [Sample(t, float(mb), 20, 10, used) for t, mb, used in zip(times, memory, cpu_s.tolist(), strict=True)]
    latencies = [(float(t), 0.01 * (slower if slow else 1.0)) for t, slow in zip(times, held_up, strict=True)]
    return report(Counted({"affine": len(times)}, {}, [], 0, latencies), samples, [1.0], 0.0, SECONDS, log)


def test_a_stable_server_has_no_complaints() -> None:
    assert soaked().is_good
    assert soaked(saw_mb=20).is_good
    assert soaked(leaps_mb=30).is_good  # an allocator that takes two more arenas


def test_other_programs_make_no_drift() -> None:
    assert soaked(slower=10, fastest_too=False).is_good
    assert soaked(slower=10, works_more=False).is_good
    assert not soaked(slower=10).is_good


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mb_per_hour": 3000.0, "saw_mb": 20.0}, "memory rises by "),
        ({"slower": 4.0}, "answers take longer: p50 10.00 ms in the first quarter, 40.00 ms in the last"),
        ({"log": "Traceback (most recent call last):\n  oh"}, "the server's log holds a stack trace"),
    ],
    ids=["memory under a saw", "latency", "trace"],
)
def test_an_unstable_server_has_a_complaint(change: dict[str, float], complaint: str) -> None:
    (said,) = soaked(**change).complaints  # type: ignore[arg-type]  # (one of them is text)
    assert said.startswith(complaint)


def recorded(name: str) -> list[Sample]:
    """The samples in a file of columns like those of `Sample`."""
    with (RECORDED / name).open(newline="") as file:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]
    return [Sample(at_s, mb, int(files), int(threads), cpu_s) for at_s, mb, files, threads, cpu_s in rows]


def judged(name: str) -> list[str]:
    """What is said of two recorded minutes, where every request was answered in time."""
    samples = recorded(name)
    ended = samples[-1].at_s
    counted = Counted({"affine": 1}, {}, [], 0, [(0.0, 0.01), (ended, 0.01)])
    return list(report(counted, samples, [1.0], 0.0, ended, "").complaints)


@pytest.mark.parametrize("name", ["shared_machine.csv", "crowded_machine.csv", "many_reloads.csv"])
def test_recorded_servers_without_a_leak_are_good(name: str) -> None:
    assert judged(name) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("leaking_memory.csv", "memory rises by "), ("leaking_files.csv", "descriptors: ")],
    ids=["a kilobyte with each request", "a file every 500 requests"],
)
def test_what_a_server_leaks_is_found_in_two_minutes(name: str, complaint: str) -> None:
    (said,) = judged(name)
    assert said.startswith(complaint)


@pytest.mark.parametrize("seed", range(4))
def test_a_leak_added_to_a_recorded_server_is_found(seed: int) -> None:
    random = np.random.default_rng(seed)
    samples = recorded("crowded_machine.csv")
    settled = [sample for sample in samples if sample.at_s >= SETTLED_AFTER * samples[-1].at_s]
    noise = random.normal(0, 1, len(settled))
    for mb_a_second, is_leak in ((0.0, False), (0.5, True)):
        leaking = [
            Sample(s.at_s, s.resident_mb + mb_a_second * s.at_s + float(n), s.descriptors, s.threads)
            for s, n in zip(settled, noise, strict=True)
        ]
        _, complaints = judge_memory(leaking, 1, SECONDS)
        assert bool(complaints) is is_leak


def test_a_rise_has_the_bounds_that_its_noise_gives() -> None:
    random = np.random.default_rng(0)
    times = [t / 3600 for t in range(3600)]
    rising = rise(times, [2.0 * t for t in times])
    assert (rising.low, rising.per_unit, rising.high) == pytest.approx((2, 2, 2))
    assert rising.times(10).high == pytest.approx(20)
    noisy = rise(times, [float(value) for value in random.standard_normal(3600)])
    assert noisy.low < 0 < noisy.high
