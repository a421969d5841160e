"""One line of the report: what a server did under one load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.load.histogram import LatencyHistogram
from serve.benchmark.load.order import Tally
from serve.benchmark.loads import Load
from serve.benchmark.server_statistics import ServerTotals

PERCENTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}
BUSY = 0.95  # a process that waits for less than a twentieth of its time
LATE_MS = 1.0
LATE_SHARE = 0.25
KEPT_UP = 0.95  # of the requests of a rate


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds; percentiles by nearest rank, within 0.05 %."""

    min: float
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, latencies: LatencyHistogram) -> Latency:
        """From a histogram that holds something."""
        p50, p90, p95, p99, p999 = latencies.percentiles_ms(list(PERCENTS.values()))
        smallest, largest = latencies.min_ns / 1e6, latencies.max_ns / 1e6
        return cls(min=smallest, mean=latencies.mean_ms, p50=p50, p90=p90, p95=p95, p99=p99, p999=p999, max=largest)

    def to_json(self) -> dict[str, float]:
        """With the names that people use."""
        return {name.replace("p999", "p99.9"): value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Level:
    """A load and its outcome.

    Attributes:
        load: what was asked for.
        batch_size: rows per request.
        tally: what was measured.
        latency: of the requests that succeeded.
        histogram: the same, whole.
        server: the server's counters over this load; None from a server that keeps none, or was started again meanwhile.
        models: the names of the models that the requests were for.
        windows: the same in slices of time, in their order, for as long as requests were started.
        goodput_ms: the latency up to which an answer is of use; None for any.
        stable: whether the last windows agreed; None where nobody asked.
        ended_early: why the load stopped before its end; None where it did not.
    """

    load: Load
    batch_size: int
    tally: Tally
    latency: Latency
    histogram: LatencyHistogram
    server: ServerTotals | None
    models: Sequence[str] = ()
    windows: Sequence[Tally] = ()
    goodput_ms: float | None = None
    stable: bool | None = None
    ended_early: str | None = None

    @classmethod
    def of(
        cls,
        tally: Tally,
        server: ServerTotals | None,
        *,
        load: Load,
        batch_size: int,
        models: Sequence[str] = (),
        windows: Sequence[Tally] = (),
        goodput_ms: float | None = None,
        stable: bool | None = None,
        ended_early: str | None = None,
    ) -> Level:
        """From what the load generator and the server have counted.

        Raises:
            BenchmarkError: no request succeeded; the text has the server's message.
        """
        histogram = tally.latency
        if not histogram.total:
            code, _ = next(iter(tally.errors.most_common(1)), ("", 0))
            reason = f"{code}: {tally.messages[code]}" if code else ended_early or "none was started in the time given"
            raise BenchmarkError(f"at {load.text} no request succeeded ({tally.failed} failed): {reason}")
        return cls(
            load=load,
            batch_size=batch_size,
            tally=tally,
            latency=Latency.of(histogram),
            histogram=histogram,
            server=server,
            models=models,
            windows=windows,
            goodput_ms=goodput_ms,
            stable=stable,
            ended_early=ended_early,
        )

    @property
    def requests(self) -> int:
        """Answered with success."""
        return self.histogram.total

    @property
    def failed(self) -> int:
        """Answered with an error, or not at all."""
        return self.tally.failed

    @property
    def requests_per_second(self) -> float:
        """Requests answered with success per second."""
        return self.requests / self.tally.seconds

    @property
    def goodput_per_second(self) -> float | None:
        """Requests answered with success within `goodput_ms` per second."""
        return None if self.goodput_ms is None else self.histogram.within(self.goodput_ms) / self.tally.seconds

    @property
    def late_ms(self) -> float | None:
        """How late the generator noticed requests of a rate (p99); None in a closed loop."""
        return self.tally.lateness.percentiles_ms([99])[0] if self.tally.lateness.total else None

    def percentile_ms(self, percent: float) -> float:
        """The latency that so many percent of the requests do not pass."""
        return self.histogram.percentiles_ms([percent])[0]

    def doubts(self) -> list[str]:
        """What makes these figures doubtful, a sentence each."""
        lines = [self._generator_doubt(), self._stability_doubt(), self._foreign_doubt()]
        if self.ended_early is not None:
            lines.append(f"ended early ({self.ended_early}); the figures are of what was measured until then")
        return [line for line in lines if line]

    def failures(self) -> list[str]:
        """What went wrong, a line for each gRPC status, with the server's first words about it."""
        counts = self.tally.errors.most_common()
        return [f"at {self.load.text}: {count} {code}: {self.tally.messages.get(code, '')}" for code, count in counts]

    def to_json(self) -> dict[str, Any]:
        """The level as bench.json holds it; see serve/benchmark/reports/report.py."""
        server, tally = self.server, self.tally
        return {
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "batch_size": self.batch_size,
            "requests": self.requests,
            "errors": self.failed,
            "errors_by_status": dict(tally.errors),
            "error_messages": tally.messages,
            "seconds": tally.seconds,
            "requests_per_second": self.requests_per_second,
            "rows_per_second": self.requests_per_second * self.batch_size,
            "goodput_per_second": self.goodput_per_second,
            "latency_ms": self.latency.to_json(),
            "mean_batch_size": server and server.mean_batch_size,
            "server_ms": {"compute": server and server.compute_ms, **(server or ServerTotals()).split_ms},
            "models": self._models_json(),
            "generator": {"sent": tally.sent, "busy": tally.busy, "late_p99_ms": self.late_ms, "held_back": tally.held_back},
            "windows": [_window_json(window) for window in self.windows],
            "stable": self.stable,
            "ended_early": self.ended_early,
        }

    def _models_json(self) -> list[dict[str, Any]]:
        pairs = zip(self.models, self.tally.latencies, strict=False)
        return [
            {"model": name, "requests": latencies.total, "latency_ms": Latency.of(latencies).to_json()}
            for name, latencies in pairs
            if latencies.total
        ]

    def _generator_doubt(self) -> str | None:
        late_ms, rate = self.late_ms, self.load.rate
        if self.tally.busy > BUSY and (rate is None or self.tally.sent < KEPT_UP * rate * self.tally.seconds):
            return "the load generator was the limit: it had nothing to wait for; use more --processes, or other machines"
        if late_ms is not None and late_ms > max(LATE_MS, self.latency.p99 * LATE_SHARE):
            return (
                "the load generator was late by more than a quarter of p99, which is in the latencies; use more --processes,"
                " or a machine that the server does not use"
            )
        return None

    def _stability_doubt(self) -> str | None:
        return "the windows kept differing by more than 10 %; the last three are shown" if self.stable is False else None

    def _foreign_doubt(self) -> str | None:
        answered, ours = self.server.requests if self.server else 0, self.requests + self.failed
        if self.stable is not None or answered <= ours:
            return None  # windows are cut while requests are in flight, so the counters cannot fit exactly
        return (
            f"the server answered {answered} requests, of which {self.requests} were ours: someone else is asking it,"
            " and the batch sizes and server times are theirs too"
        )


def _window_json(window: Tally) -> dict[str, Any]:
    latency = window.latency
    p99_ms = latency.percentiles_ms([99])[0] if latency.total else None
    return {"seconds": window.seconds, "requests": latency.total, "errors": window.failed, "p99_ms": p99_ms}
