"""Load a server at one concurrency after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from serve.benchmark.level import Level
from serve.benchmark.load_generator import LoadGenerator, Order
from serve.benchmark.server_statistics import ServerTotals
from serve.client import InferenceClient, InferenceClientError


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is measured.

    Attributes:
        model: the model's name.
        version: its version; empty for the server's choice.
        batch_size: rows per request.
        concurrencies: requests in flight, one level each.
        seconds: length of a level; None to let `requests` end it.
        requests: requests of a level; None to let `seconds` end it.
        warmup_s: unmeasured load before each level.
        timeout_s: the deadline of each request.
    """

    model: str
    version: str
    batch_size: int
    concurrencies: Sequence[int]
    seconds: float | None
    requests: int | None
    warmup_s: float
    timeout_s: float


def run_sweep(sweep: Sweep, client: InferenceClient, generator: LoadGenerator) -> Iterator[Level]:
    """Measure level by level, yielding each when it is done.

    Raises:
        BenchmarkError: no request of a level succeeded, or the load generator died.
        InferenceClientError: the server does not answer for its statistics.
    """
    for concurrency in sweep.concurrencies:
        order = Order(concurrency=concurrency, seconds=sweep.seconds, requests=sweep.requests, timeout_s=sweep.timeout_s)
        if sweep.warmup_s > 0:
            generator.run(replace(order, seconds=sweep.warmup_s, requests=None))
        # The counters are read while nothing is in flight, so they cover exactly the requests that are measured.
        before = _totals(client, sweep)
        outcome = generator.run(order)
        after = _totals(client, sweep)
        server = after - before if before and after else None
        yield Level.of(outcome, server, concurrency=concurrency, batch_size=sweep.batch_size)


def _totals(client: InferenceClient, sweep: Sweep) -> ServerTotals | None:
    try:
        return ServerTotals.of(client.statistics(sweep.model, sweep.version))
    except InferenceClientError as error:
        if error.code == "UNIMPLEMENTED":
            return None
        raise
