"""One line of the report: what a server did at one concurrency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.load_generator import Outcome
from serve.benchmark.server_statistics import ServerTotals

NANOSECONDS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds from sending a request to its answer; percentiles are latencies that really occurred (nearest rank)."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float

    @classmethod
    def of(cls, latencies_ns: np.ndarray[Any, np.dtype[np.int64]]) -> Latency:
        """From int64 [requests] nanoseconds, at least one."""
        p50, p90, p99 = np.percentile(latencies_ns, [50, 90, 99], method="inverted_cdf") / NANOSECONDS_PER_MS
        largest, mean = latencies_ns.max() / NANOSECONDS_PER_MS, latencies_ns.mean() / NANOSECONDS_PER_MS
        return cls(p50=float(p50), p90=float(p90), p99=float(p99), max=float(largest), mean=float(mean))


@dataclass(frozen=True, kw_only=True)
class Level:
    """A load and its outcome.

    Attributes:
        concurrency: requests in flight.
        batch_size: rows per request.
        requests: answered with success.
        errors: failed requests by gRPC status name.
        seconds: how long the load took.
        latency: of the requests that succeeded.
        server: the server's counters over this load; None from a server that keeps none.
    """

    concurrency: int
    batch_size: int
    requests: int
    errors: dict[str, int]
    seconds: float
    latency: Latency
    server: ServerTotals | None

    @classmethod
    def of(cls, outcome: Outcome, server: ServerTotals | None, *, concurrency: int, batch_size: int) -> Level:
        """From what the load generator and the server have counted.

        Raises:
            BenchmarkError: no request succeeded; the text has the server's message.
        """
        requests, failed = len(outcome.latencies_ns), outcome.errors.total()
        if requests == 0:
            code, _ = next(iter(outcome.errors.most_common(1)), ("", 0))
            reason = f"{code}: {outcome.messages[code]}" if code else "none was started in the time given"
            raise BenchmarkError(f"at concurrency {concurrency} no request succeeded ({failed} failed): {reason}")
        return cls(
            concurrency=concurrency,
            batch_size=batch_size,
            requests=requests,
            errors=dict(outcome.errors),
            seconds=outcome.seconds,
            latency=Latency.of(outcome.latencies_ns),
            server=server,
        )

    @property
    def requests_per_second(self) -> float:
        """Requests answered with success per second."""
        return self.requests / self.seconds

    def to_json(self) -> dict[str, Any]:
        """The level as bench.json holds it; see serve/benchmark/report.py."""
        return {
            "concurrency": self.concurrency,
            "requests": self.requests,
            "errors": sum(self.errors.values()),
            "errors_by_status": self.errors,
            "seconds": self.seconds,
            "requests_per_second": self.requests_per_second,
            "rows_per_second": self.requests_per_second * self.batch_size,
            "latency_ms": vars(self.latency),
            "mean_batch_size": self.server and self.server.mean_batch_size,
            "server_ms": {
                "queue": self.server and self.server.queue_ms,
                "compute": self.server and self.server.compute_ms,
            },
        }
