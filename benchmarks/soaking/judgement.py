"""Results of a soak, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.soaking.latency_judgement import judge_latency
from benchmarks.soaking.memory_judgement import judge_memory
from benchmarks.soaking.process_watch import Sample
from benchmarks.soaking.straight_line import BLOCKS
from benchmarks.soaking.tally import Counted

# A server allocates memory at first that it keeps (thread stacks, arenas, caches): only growth after this time counts.
SETTLED_AFTER = 1 / 3
SPARE_DESCRIPTORS, SPARE_THREADS = 8, 4
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Report:
    """Results and verdict of a soak.

    Attributes:
        figures: results by name.
        complaints: descriptions of faults, one line each.
    """

    figures: dict[str, object]
    complaints: Sequence[str]

    @property
    def is_good(self) -> bool:
        """Whether there are no complaints."""
        return not self.complaints

    def ended(self, code: int) -> Report:
        """Add the server's exit code after SIGTERM."""
        more = [] if code == 0 else [f"the server ended with code {code} after SIGTERM, expected 0"]
        figures = self.figures | {"exit_code": code}
        return replace(self, figures=figures, complaints=[*self.complaints, *more])


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
    latency, latency_complaints = judge_latency(counted.latencies, started, ended)
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
