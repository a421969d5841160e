"""What a soak has shown, and whether it is good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.soaking.process_watch import BLOCKS, Sample, slope
from benchmarks.soaking.tally import Counted

# A server takes memory at first that it keeps (thread stacks, arenas, caches): a rise is only one if it goes on after that.
SETTLED_AFTER = 1 / 3
MAX_MB_PER_HOUR = 20.0
NOISE_MB = 4.0  # a rise of less than this is an allocator's whim
SPARE_DESCRIPTORS, SPARE_THREADS = 8, 4
DRIFT = 3.0  # the last quarter's p50 over the first's; machines that are shared take twice as long now and then
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Report:
    """The outcome.

    Attributes:
        figures: by name.
        complaints: what is not as it must be, a line each.
    """

    figures: dict[str, object]
    complaints: Sequence[str]

    @property
    def is_good(self) -> bool:
        """Whether there is nothing to complain about."""
        return not self.complaints

    def ended(self, code: int) -> Report:
        """The same, knowing with what code the server ended after SIGTERM."""
        more = [] if code == 0 else [f"the server ended with code {code} after SIGTERM, expected 0"]
        figures = self.figures | {"exit_code": code}
        return replace(self, figures=figures, complaints=[*self.complaints, *more])


def report(
    counted: Counted, samples: Sequence[Sample], recoveries_s: Sequence[float], started: float, ended: float, log: str
) -> Report:
    """Judge a soak.

    Args:
        counted: what became of requests.
        samples: the first before any load.
        recoveries_s: how long it took for a model that hung to answer again.
        started: when the load began, on time.monotonic()'s clock.
        ended: when it ended.
        log: the server's.
    """
    memory, memory_complaints = _memory(samples, started, ended, sum(counted.answered.values()))
    latency, latency_complaints = _latency(counted, started, ended)
    settled = [sample for sample in samples if sample.at_s >= started + SETTLED_AFTER * (ended - started)]
    first, last = (settled[:BLOCKS], settled[-BLOCKS:]) if settled else ([], [])
    figures: dict[str, object] = {
        "seconds": round(ended - started, 1),
        "right_answers": sum(counted.answered.values()),
        "wrong": counted.wrongs,
        "answered": counted.answered,
        "mischief": counted.survived,
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


def _memory(samples: Sequence[Sample], started: float, ended: float, answers: int) -> tuple[dict[str, object], list[str]]:
    settled = [sample for sample in samples if sample.at_s >= started + SETTLED_AFTER * (ended - started)]
    figures: dict[str, object] = {"resident_mb": f"{samples[0].resident_mb:.1f} -> {samples[-1].resident_mb:.1f}"}
    if len(settled) < 2 * BLOCKS:
        return figures, []
    rise = slope([sample.at_s for sample in settled], [sample.resident_mb for sample in settled])
    figures["mb_per_hour"] = f"{rise.per_hour:+.1f} (95 %: {rise.low:+.1f} to {rise.high:+.1f})"
    figures["mb_per_million_answers"] = round(rise.per_hour * (ended - started) / 3600 / max(1, answers) * 1e6, 2)
    hours = (settled[-1].at_s - settled[0].at_s) / 3600
    if rise.low > MAX_MB_PER_HOUR and rise.per_hour * hours > NOISE_MB and _has_left_its_level(settled):
        return figures, [f"memory rises by {rise.per_hour:.0f} MB an hour, at least {rise.low:.0f}"]
    return figures, []


def _has_left_its_level(settled: Sequence[Sample]) -> bool:
    """Whether the lowest of the later half is above the highest of the earlier one.

    Allocators keep what they were given back for a while: memory goes up and down like a saw's teeth, one of which may look
    like a rise. What leaks does not come down again.
    """
    earlier, later = np.array_split(np.array([sample.resident_mb for sample in settled]), 2)
    return float(np.percentile(later, 10)) > float(np.percentile(earlier, 90))


def _latency(counted: Counted, started: float, ended: float) -> tuple[dict[str, object], list[str]]:
    timed = np.array([pair for pair in counted.latencies if not math.isnan(pair[0])])
    if not len(timed):
        return {}, []
    quarter = (ended - started) / 4
    first = timed[timed[:, 0] < started + quarter, 1] * 1e3
    last = timed[timed[:, 0] >= ended - quarter, 1] * 1e3
    if not len(first) or not len(last):
        return {}, ["no answers in the first quarter, or none in the last"]
    quantiles = {percent: [float(np.percentile(part, percent)) for part in (first, last)] for percent in (50, 99)}
    figures: dict[str, object] = {f"p{percent}_ms": f"{q[0]:.2f} -> {q[1]:.2f}" for percent, q in quantiles.items()}
    before, after = quantiles[50]
    if after > DRIFT * before:
        return figures, [f"answers take longer: p50 {before:.2f} ms in the first quarter, {after:.2f} ms in the last"]
    return figures, []
