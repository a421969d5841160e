"""Judges whether a process leaks, from its memory over time under load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from benchmarks.soaking.process_watch import Sample
from benchmarks.soaking.straight_line import BLOCKS, rise

HOUR_S = 3600.0
MAX_MB_PER_HOUR = 20.0
NOISE_MB = 10.0  # a smaller rise is attributed to the allocator: reloads alone allocate and free as much
LEAPS = 2  # upward steps that are allowed, as an allocator may add further arenas


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
    """Split the samples into the stretches."""
    edges = [round(index) for index in np.linspace(0, len(settled), BLOCKS + 1)]
    return [settled[start:end] for start, end in pairwise(edges)]
