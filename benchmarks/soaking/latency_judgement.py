"""Judges whether latency increases, on a machine that may also run other programs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

DRIFT = 3.0
PERCENTS = (10, 50, 99)


def judge_latency(
    latencies: Sequence[tuple[float, float]], started: float, ended: float
) -> tuple[dict[str, object], list[str]]:
    """Figures and complaints, from the first and last quarters of the time.

    Other programs slow down most answers for a while, but hardly the fastest tenth, which fell into idle moments. A server that
    does more work per request than before slows down all of them. So both the median and the fastest tenth must have become
    `DRIFT` times as slow.

    Args:
        latencies: (time of the request, seconds until the answer), on one clock; the time is NaN for those that do not count.
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
    if all(quantiles[percent][1] > DRIFT * quantiles[percent][0] for percent in (10, 50)):
        before, after = quantiles[50]
        return figures, [f"answers take longer: p50 {before:.2f} ms in the first quarter, {after:.2f} ms in the last"]
    return figures, []
