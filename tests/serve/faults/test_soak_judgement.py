"""benchmarks/soak.py complains of what it should, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.soaking.judgement import Report, report
from benchmarks.soaking.process_watch import Sample, slope
from benchmarks.soaking.tally import Counted

SECONDS = 120.0


def soaked(*, mb_per_hour: float = 0.0, saw_mb: float = 0.0, files: float = 0.0, slower: float = 1.0, log: str = "") -> Report:
    times = np.arange(0.0, SECONDS, 0.25)
    memory = 100 + mb_per_hour * times / 3600 + saw_mb * (times % 37) / 37
    samples = [Sample(t, float(mb), int(20 + files * t), 10) for t, mb in zip(times, memory, strict=True)]
    latencies = [(float(t), 0.01 * (slower if t > SECONDS / 2 else 1.0)) for t in times]
    return report(Counted({"affine": len(times)}, {}, [], 0, latencies), samples, [1.0], 0.0, SECONDS, log)


def test_a_server_that_stays_as_it_was_is_good() -> None:
    assert soaked().is_good
    assert soaked(saw_mb=20).is_good
    assert soaked().ended(0).is_good


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mb_per_hour": 400.0}, "memory rises by 400 MB an hour, at least 400"),
        ({"files": 0.5}, "descriptors: 4"),
        ({"slower": 4.0}, "answers take longer: p50 10.00 ms in the first quarter, 40.00 ms in the last"),
        ({"log": "Traceback (most recent call last):\n  oh"}, "the server's log holds a stack trace"),
    ],
    ids=["memory", "files", "latency", "trace"],
)
def test_one_that_does_not_is_not(change: dict[str, float], complaint: str) -> None:
    (said,) = soaked(**change).complaints  # type: ignore[arg-type]  # (one of them is text)
    assert said.startswith(complaint)


def test_a_crash_at_the_end_is_a_complaint() -> None:
    assert soaked().ended(-6).complaints == ["the server ended with code -6 after SIGTERM, expected 0"]


def test_a_slope_has_the_bounds_that_its_noise_gives() -> None:
    random = np.random.default_rng(0)
    times = [float(t) for t in range(3600)]
    rising = slope(times, [2.0 * t / 3600 for t in times])
    assert (rising.low, rising.per_hour, rising.high) == pytest.approx((2, 2, 2))
    noisy = slope(times, [float(value) for value in random.standard_normal(3600)])
    assert noisy.low < 0 < noisy.high
