"""Levels as a sweep would have made them, for tests of what is done with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from serve.benchmark.level import Level
from serve.benchmark.load_generator import Outcome
from serve.benchmark.report import Report
from serve.benchmark.server_statistics import ServerTotals

SERVER = ServerTotals(requests=4, rows=8, executions=2, queued=4, queue_ns=2_000_000, computed=4, compute_ns=6_000_000)


def outcome(latencies_ns: Sequence[int], errors: dict[str, int] | None = None, seconds: float = 2.0) -> Outcome:
    counted = Counter(errors or {})
    messages = {code: f"the server's text for {code}" for code in counted}
    return Outcome(latencies_ns=np.array(latencies_ns, np.int64), errors=counted, messages=messages, seconds=seconds)


def level(concurrency: int = 2, errors: dict[str, int] | None = None, server: ServerTotals | None = SERVER) -> Level:
    """Four requests of two rows in two seconds, with latencies of 1 to 4 ms."""
    made = outcome([3_000_000, 1_000_000, 4_000_000, 2_000_000], errors)
    return Level.of(made, server, concurrency=concurrency, batch_size=2)


def report(*levels: Level, provider: str | None = "CPUExecutionProvider") -> Report:
    return Report(
        model="mlp",
        version="3",
        address="127.0.0.1:8001",
        provider=provider,
        batch_size=2,
        command="halfserve bench mlp",
        levels=levels,
    )
