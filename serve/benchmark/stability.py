"""When a load has been measured long enough: three windows in a row that agree."""

from __future__ import annotations

from collections.abc import Sequence

from serve.benchmark.load.order import Tally

WINDOWS = 3
TOLERANCE = 0.1
MAX_WINDOWS = 10


def is_stable(windows: Sequence[Tally], percent: float) -> bool:
    """Whether the last three windows' throughputs and latencies each lie within 10 % of their mean.

    Args:
        windows: in their order.
        percent: which percentile of the latency must agree.
    """
    last = windows[-WINDOWS:]
    if len(last) < WINDOWS or not all(window.latency.total for window in last):
        return False
    rates = [window.latency.total / window.seconds for window in last]
    latencies_ms = [window.latency.percentiles_ms([percent])[0] for window in last]
    return _agree(rates) and _agree(latencies_ms)


def _agree(values: Sequence[float]) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= TOLERANCE * mean for value in values)
