"""Levels as a sweep would have made them, for tests of what is done with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfserve.serve.benchmark.benchmark_report import BenchmarkReport
from halfserve.serve.benchmark.comparison import ComparedLevel, compared
from halfserve.serve.benchmark.level import Level, Load, ServerTotals
from halfserve.serve.benchmark.load.spec import LatencyHistogram, LoadStatistics

SERVER = ServerTotals(
    requests=4,
    rows=8,
    executions=2,
    queued=4,
    queue_ns=2_000_000,
    computed=4,
    compute_input_ns=1_000_000,
    compute_infer_ns=4_000_000,
    compute_output_ns=1_000_000,
)


def histogram(*latencies_ms: float) -> LatencyHistogram:
    return LatencyHistogram.of(np.array([round(ms * 1e6) for ms in latencies_ms], np.int64))


def tally(latencies_ms: Sequence[float], errors: dict[str, int] | None = None, **changes: Any) -> LoadStatistics:
    counted = Counter(errors or {})
    facts: dict[str, Any] = {"seconds": 2.0, "sent": len(latencies_ms) + counted.total(), **changes}
    messages = {code: f"the server's text for {code}" for code in counted}
    return LoadStatistics(latencies=[histogram(*latencies_ms)], errors=counted, messages=messages, **facts)


def level(
    concurrency: int = 2,
    errors: dict[str, int] | None = None,
    server: ServerTotals | None = SERVER,
    *,
    load: Load | None = None,
    latencies_ms: Sequence[float] = (3, 1, 4, 2),
    **changes: Any,
) -> Level:
    """Four requests of two rows in two seconds, with latencies of 1 to 4 ms."""
    made = tally(latencies_ms, errors)
    return Level(tally=made, server=server, load=load or Load(concurrency=concurrency), batch_size=2, models=["mlp"], **changes)


def comparison(*names: str) -> list[ComparedLevel]:
    """Two rounds of each; the second is as good as the first."""
    return [compared(name, [level(1), level(1)], [level(1), level(1)]) for name in names]


def report(*levels: Level, provider: str | None = "CPUExecutionProvider", **changes: Any) -> BenchmarkReport:
    return BenchmarkReport(
        model="mlp",
        version="3",
        address="127.0.0.1:8001",
        provider=provider,
        command="halfserve bench mlp",
        levels=levels,
        **changes,
    )
