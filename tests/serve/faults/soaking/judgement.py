"""The verdict on a soak: answers, memory, open files, threads, latency and the server's log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.harness.process_watch import Sample
from tests.serve.faults.soaking.tally import Counted

# A server allocates memory at first that it keeps (thread stacks, arenas, caches): only growth after this time counts.
SETTLED_AFTER = 1 / 3
SPARE_DESCRIPTORS, SPARE_THREADS = 8, 4
TRACEBACK = "Traceback (most recent call last)"
DRIFT = 3.0
PERCENTS = (10, 50, 99)
HOUR_S = 3600.0
MAX_MB_PER_HOUR = 20.0
NOISE_MB = 10.0  # a smaller rise is attributed to the allocator: reloads alone allocate and free as much
LEAPS = 2  # upward steps that are allowed, as an allocator may add further arenas
# Two-sided 95 % points of Student's t distribution, for 1, 2, ... degrees of freedom.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10)
BLOCKS = 12  # neighbouring samples are similar, so the line is fitted to the means of this many stretches


@dataclass(frozen=True)
class Report:
    figures: dict[str, object]  # results by name
    complaints: Sequence[str]  # descriptions of faults, one line each

    @property
    def is_good(self) -> bool:
        return not self.complaints


def report(
    counted: Counted, samples: Sequence[Sample], recoveries_s: Sequence[float], started: float, ended: float, log: str
) -> Report:
    """Judge a soak.

    Args:
        counted: results of the requests.
        samples: samples of the process, the first one before any load.
        recoveries_s: seconds until a model that hung answered again, for each case.
        started: start of the load, on time.monotonic()'s clock.
        ended: end of the load, on time.monotonic()'s clock.
        log: the server's log.
    """
    settled = [sample for sample in samples if sample.at_s >= started + SETTLED_AFTER * (ended - started)]
    memory, memory_complaints = judge_memory(settled, sum(counted.answered.values()), ended - started)
    latency, latency_complaints = judge_latency(counted.latencies, samples, started, ended)
    first, last = (settled[:BLOCKS], settled[-BLOCKS:]) if settled else ([], [])
    figures: dict[str, object] = {
        "seconds": round(ended - started, 1),
        "right_answers": sum(counted.answered.values()),
        "wrong": counted.wrongs,
        "answered": counted.answered,
        "faults": counted.survived,
        "resident_mb": f"{samples[0].resident_mb:.1f} -> {samples[-1].resident_mb:.1f}",
        "cores_used": round((samples[-1].cpu_s - samples[0].cpu_s) / max(1e-9, ended - started), 2),
        **memory,
        **latency,
        "slowest_recovery_s": round(max(recoveries_s, default=0.0), 2),
    }
    complaints = [*counted.wrong, *memory_complaints, *latency_complaints]
    for what, spare in (("descriptors", SPARE_DESCRIPTORS), ("threads", SPARE_THREADS)):
        before, after = (int(np.median([getattr(sample, what) for sample in part] or [0])) for part in (first, last))
        figures[what] = f"{before} -> {after}"
        if after > before + spare:
            complaints.append(f"{what}: {before} after the first third, {after} at the end")
    if TRACEBACK in log:
        complaints.append("the server's log holds a stack trace:\n" + log[log.index(TRACEBACK) :][:3000])
    if not counted.answered:
        complaints.append("nothing was answered")
    return Report(figures, complaints)


def judge_latency(
    latencies: Sequence[tuple[float, float]], samples: Sequence[Sample], started: float, ended: float
) -> tuple[dict[str, object], list[str]]:
    """Figures and complaints, from the first and last quarters of the time.

    Other programs slow answers down, but the server's processor time for one stays the same. A server that does more work per
    request than before takes more of both. So the median, the fastest tenth and the processor time of an answer must all have
    become `DRIFT` times as long.

    Args:
        latencies: (time of the request, seconds until the answer), on one clock; the time is NaN for those that do not count.
        samples: samples of the process, for its processor time.
        started: start of the load.
        ended: end of the load.
    """
    timed = np.array([pair for pair in latencies if not math.isnan(pair[0])])
    if not len(timed):
        return {}, []
    quarter = (ended - started) / 4
    first = timed[timed[:, 0] < started + quarter, 1] * 1e3
    last = timed[timed[:, 0] >= ended - quarter, 1] * 1e3
    if not len(first) or not len(last):
        return {}, ["no answers in the first quarter, or none in the last"]
    quantiles = {percent: [float(np.percentile(part, percent)) for part in (first, last)] for percent in PERCENTS}
    figures: dict[str, object] = {f"p{percent}_ms": f"{q[0]:.2f} -> {q[1]:.2f}" for percent, q in quantiles.items()}
    edges = [started, started + quarter, ended - quarter, ended]
    used_s = np.diff(np.interp(edges, [sample.at_s for sample in samples], [sample.cpu_s for sample in samples]))
    of_one_ms = [1e3 * used_s[0] / len(first), 1e3 * used_s[2] / len(last)]
    figures["cpu_ms_per_answer"] = f"{of_one_ms[0]:.2f} -> {of_one_ms[1]:.2f}"
    drifts = [quantiles[10], quantiles[50], of_one_ms]
    if all(after > DRIFT * before for before, after in drifts):
        before, after = quantiles[50]
        return figures, [f"answers take longer: p50 {before:.2f} ms in the first quarter, {after:.2f} ms in the last"]
    return figures, []


def judge_memory(settled: Sequence[Sample], answers: int, seconds: float) -> tuple[dict[str, object], list[str]]:
    """Figures and complaints.

    Memory rises and falls like a saw's teeth, because allocators keep freed memory for a while, and it leaps when they add an
    arena. A leak raises the floor under the teeth steadily. So a rise counts if the line through the floors of `BLOCKS`
    stretches rises significantly, and the floors rise even without their largest `LEAPS` steps.

    Args:
        settled: samples after the server's initial allocations.
        answers: total number of answered requests.
        seconds: time of the load in seconds.
    """
    if len(settled) < 2 * BLOCKS:
        return {}, []
    hours = [sample.at_s / HOUR_S for sample in settled]
    line = rise(hours, [sample.resident_mb for sample in settled])
    figures: dict[str, object] = {
        "mb_per_hour": f"{line.per_unit:+.1f} (95 %: {line.low:+.1f} to {line.high:+.1f})",
        "mb_per_million_answers": round(line.per_unit * seconds / HOUR_S / max(1, answers) * 1e6, 2),
    }
    floors = np.array([min(s.resident_mb for s in part) for part in _parts(settled)])
    floor = rise(hours, np.repeat(floors, [len(part) for part in _parts(settled)]).tolist())
    steps = np.sort(np.diff(floors))
    steady_mb = float(steps[:-LEAPS].sum())
    figures["steady_rise_mb"] = round(steady_mb, 2)
    if floor.low > MAX_MB_PER_HOUR and steady_mb > NOISE_MB:
        return figures, [f"memory rises by {floor.per_unit:.0f} MB an hour, at least {floor.low:.0f}"]
    return figures, []


def _parts(settled: Sequence[Sample]) -> list[Sequence[Sample]]:
    edges = [round(index) for index in np.linspace(0, len(settled), BLOCKS + 1)]
    return [settled[start:end] for start, end in pairwise(edges)]


@dataclass(frozen=True)
class Rise:
    """Increase of a value per unit of the independent variable, with its 95 % confidence interval."""

    per_unit: float
    low: float
    high: float

    def times(self, factor: float) -> Rise:
        """The increase per `factor` units."""
        return Rise(self.per_unit * factor, self.low * factor, self.high * factor)


def rise(against: Sequence[float], values: Sequence[float]) -> Rise:
    """Least squares over the means of `BLOCKS` stretches, with the usual interval of a regression line's slope.

    Args:
        against: time, or a number of requests, in rising order, at least `BLOCKS` of them.
        values: the measured values at these points.
    """
    places = np.array([part.mean() for part in np.array_split(np.array(against, np.float64), BLOCKS)])
    means = np.array([part.mean() for part in np.array_split(np.array(values, np.float64), BLOCKS)])
    spread = places - places.mean()
    slope = float(spread @ means / (spread @ spread))
    residuals = means - means.mean() - slope * spread
    error = float(np.sqrt(residuals @ residuals / (BLOCKS - 2) / (spread @ spread)))
    half = T_95[BLOCKS - 3] * error
    return Rise(slope, slope - half, slope + half)
