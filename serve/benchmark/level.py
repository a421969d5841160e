"""A load and its results: requested load, latency percentiles, and the server's own counters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from halfserve.protos.inference_pb2 import ModelStatistics
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError
from halfserve.serve.benchmark.load.spec import LatencyHistogram, LoadStatistics, Seconds

NUMBER = r"\d+(?:\.\d+)?"
RANGE = re.compile(rf"({NUMBER}):({NUMBER})(?::(x?)({NUMBER}))?")
MAX_LEVELS = 1000
EXPECTED = "expected numbers above 0 with commas between, such as 1,4,16, or a range such as 1:64:x2 or 10:50:10"
NANOSECONDS_PER_MS = 1e6
PERCENTS = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}
BUSY = 0.95  # share of busy time above which the load process itself is the limit
LATE_MS = 1.0
LATE_SHARE = 0.25
KEPT_UP = 0.95  # a generator that sent at least this fraction of a rate's requests kept up


@dataclass(frozen=True, kw_only=True)
class Load:
    """One load: `concurrency` requests in flight (closed loop), or `rate` requests a second (open loop).

    A replay of captured arrivals has their `speed`, relative to the time of their capture, and their times, float64 [requests],
    in seconds after the start; `rate` is then the mean.
    """

    concurrency: int | None = None
    rate: float | None = None
    speed: float | None = None
    times_s: Seconds | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        if self.speed is not None:
            return f"{self.speed:g} times the captured arrivals ({self.rate:.4g} requests/s)"
        return f"{self.concurrency} in flight" if self.rate is None else f"{self.rate:g} requests/s"

    @property
    def amount(self) -> float:
        return float(self.concurrency or 0) if self.rate is None else self.rate


def parse_concurrencies(text: str, option: str = "--concurrency") -> list[int]:
    """Read whole numbers and ranges of them. Raises BenchmarkArgumentError: the text is malformed, or a number is below 1."""
    numbers = list(_numbers(text, option))
    if not all(number >= 1 and number.is_integer() for number in numbers):
        raise BenchmarkArgumentError(f"{option} {text}: {EXPECTED}")
    return [int(number) for number in numbers]


def parse_rates(text: str, option: str = "--rate") -> list[float]:
    """Read numbers and ranges of them. Raises BenchmarkArgumentError: the text is malformed, or a number is 0."""
    numbers = list(_numbers(text, option))
    if not all(0 < number < math.inf for number in numbers):
        raise BenchmarkArgumentError(f"{option} {text}: {EXPECTED}")
    return numbers


def _numbers(text: str, option: str) -> Iterator[float]:
    for part in text.split(","):
        cleaned = part.strip()
        if re.fullmatch(NUMBER, cleaned, re.ASCII):
            yield float(cleaned)
        elif match := RANGE.fullmatch(cleaned):
            yield from _range(match, f"{option} {text}")
        else:
            raise BenchmarkArgumentError(f"{option} {text}: {EXPECTED}")


def _range(match: re.Match[str], given: str) -> list[float]:
    low, high, factor = float(match[1]), float(match[2]), match[3] == "x"
    step = float(match[4] or 1)
    if low <= 0 or high < low or step <= factor or math.inf in (high, step):
        raise BenchmarkArgumentError(
            f"{given}: expected LOW:HIGH:STEP or LOW:HIGH:xFACTOR with 0 < LOW <= HIGH, STEP > 0 and FACTOR > 1"
        )
    count = math.floor(math.log(high / low, step) + 1e-9) if factor else math.floor((high - low) / step + 1e-9)
    if count >= MAX_LEVELS:
        raise BenchmarkArgumentError(f"{given}: is {count + 1} levels, expected at most {MAX_LEVELS}")
    return [low * step**index if factor else low + step * index for index in range(count + 1)]


@dataclass(frozen=True, kw_only=True)
class ServerTotals:
    """Server counters since the model was loaded, or between two times."""

    requests: int = 0  # successful requests
    failed: int = 0  # failed requests
    rows: int = 0  # rows computed (`inference_count`)
    executions: int = 0  # batches computed
    queued: int = 0  # requests counted in `queue_ns`
    queue_ns: int = 0  # total queue time in nanoseconds
    computed: int = 0  # requests counted in the following three times
    compute_input_ns: int = 0  # time for assembling the requests' batches, in nanoseconds
    compute_infer_ns: int = 0  # time for running the model, in nanoseconds
    compute_output_ns: int = 0  # time for splitting the batches, in nanoseconds

    @classmethod
    def of(cls, statistics: Iterable[ModelStatistics]) -> ServerTotals:
        """Return the sum over models and versions."""
        total = cls()
        for model in statistics:
            times = model.inference_stats
            total += cls(
                requests=times.success.count,
                failed=times.fail.count,
                rows=model.inference_count,
                executions=model.execution_count,
                queued=times.queue.count,
                queue_ns=times.queue.ns,
                computed=times.compute_infer.count,
                compute_input_ns=times.compute_input.ns,
                compute_infer_ns=times.compute_infer.ns,
                compute_output_ns=times.compute_output.ns,
            )
        return total

    def __add__(self, other: ServerTotals) -> ServerTotals:
        return ServerTotals(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def since(self, before: ServerTotals) -> ServerTotals | None:
        """Return the counts since an earlier time; None if the counters were reset in between."""
        counts = {name: value - getattr(before, name) for name, value in vars(self).items()}
        return None if min(counts.values()) < 0 else ServerTotals(**counts)

    @property
    def mean_batch_size(self) -> float | None:
        """Mean number of rows per batch; None if nothing was computed."""
        return self.rows / self.executions if self.executions else None

    @property
    def queue_ms(self) -> float | None:
        """Mean queue time of a request in milliseconds; None if none was queued."""
        return self.queue_ns / self.queued / NANOSECONDS_PER_MS if self.queued else None

    @property
    def compute_ms(self) -> float | None:
        """Mean compute time of a request's batch over all stages, in milliseconds; None if nothing was computed."""
        return self._mean_ms(self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns)

    @property
    def split_ms(self) -> dict[str, float | None]:
        """Mean time per request in milliseconds by stage, in the order of the stages."""
        return {
            "queue": self.queue_ms,
            "compute_input": self._mean_ms(self.compute_input_ns),
            "compute_infer": self._mean_ms(self.compute_infer_ns),
            "compute_output": self._mean_ms(self.compute_output_ns),
        }

    def _mean_ms(self, nanoseconds: int) -> float | None:
        return nanoseconds / self.computed / NANOSECONDS_PER_MS if self.computed else None


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latencies in milliseconds; percentiles by nearest rank, accurate to 0.05 %."""

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
        p50, p90, p95, p99, p999 = latencies.percentiles_ms(list(PERCENTS.values()))
        smallest, largest = latencies.min_ns / 1e6, latencies.max_ns / 1e6
        return cls(min=smallest, mean=latencies.mean_ms, p50=p50, p90=p90, p95=p95, p99=p99, p999=p999, max=largest)

    def to_json(self) -> dict[str, float]:
        return {name.replace("p999", "p99.9"): value for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Level:
    """Results of one load.

    Raises:
        BenchmarkError: no request succeeded; the text has the server's message.
    """

    load: Load  # requested load
    batch_size: float  # rows per request; the mean of captured requests
    tally: LoadStatistics  # statistics of the whole load
    # The server's counters over this load; None if the server keeps none, or was restarted meanwhile.
    server: ServerTotals | None
    models: Sequence[str] = ()  # names of the models that the requests were for
    windows: Sequence[LoadStatistics] = ()  # consecutive slices of the tally, for as long as requests were started
    goodput_ms: float | None = None  # latency limit of a useful answer in milliseconds; None for no limit
    stable: bool | None = None  # whether the last windows agreed; None if this was not required
    ended_early: str | None = None  # reason why the load ended early; None if it did not

    def __post_init__(self) -> None:
        if not self.histogram.total:
            tally = self.tally
            code, _ = next(iter(tally.errors.most_common(1)), ("", 0))
            reason = f"{code}: {tally.messages[code]}" if code else self.ended_early or "none was started in the time given"
            raise BenchmarkError(f"at {self.load.text} no request succeeded ({tally.failed} failed): {reason}")

    @cached_property
    def histogram(self) -> LatencyHistogram:
        """Latencies of the requests that succeeded."""
        return self.tally.latency

    @cached_property
    def latency(self) -> Latency:
        return Latency.of(self.histogram)

    @property
    def requests(self) -> int:
        return self.histogram.total

    @property
    def failed(self) -> int:
        return self.tally.failed

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.tally.seconds

    @property
    def goodput_per_second(self) -> float | None:
        return None if self.goodput_ms is None else self.histogram.within(self.goodput_ms) / self.tally.seconds

    @property
    def late_ms(self) -> float | None:
        """Delay with which requests of a rate were sent (p99), in milliseconds; None in a closed loop."""
        return self.tally.lateness.percentiles_ms([99])[0] if self.tally.lateness.total else None

    def percentile_ms(self, percent: float) -> float:
        return self.histogram.percentiles_ms([percent])[0]

    def doubts(self) -> list[str]:
        """Reasons to doubt these figures, one sentence each."""
        lines = [self._generator_doubt(), self._foreign_doubt()]
        if self.stable is False:
            lines.append("the windows kept differing by more than 10 %; the last three are shown")
        if self.ended_early is not None:
            lines.append(f"ended early ({self.ended_early}); the figures are of what was measured until then")
        return [line for line in lines if line]

    def failures(self) -> list[str]:
        """Return a line for each gRPC status of failed requests, with the server's first message."""
        counts = self.tally.errors.most_common()
        return [f"at {self.load.text}: {count} {code}: {self.tally.messages.get(code, '')}" for code, count in counts]

    def to_json(self) -> dict[str, Any]:
        """Return the level as a JSON object of bench.json; see serve/benchmark/benchmark_report.py."""
        server, tally = self.server, self.tally
        return {
            "concurrency": self.load.concurrency,
            "rate": self.load.rate,
            "speed": self.load.speed,
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
            return "the load generator was the limit: its processes never waited; use more --processes, or other machines"
        if late_ms is not None and late_ms > max(LATE_MS, self.latency.p99 * LATE_SHARE):
            return (
                "the load generator was late by more than a quarter of p99, which is in the latencies; use more --processes,"
                " or a machine that the server does not use"
            )
        return None

    def _foreign_doubt(self) -> str | None:
        answered, ours = self.server.requests if self.server else 0, self.requests + self.failed
        if self.stable is not None or answered <= ours:
            return None  # windows are cut while requests are in flight, so the counters cannot match exactly
        return (
            f"the server answered {answered} requests, of which {self.requests} were ours: another client loads it,"
            " and the batch sizes and server times include its requests"
        )


def _window_json(window: LoadStatistics) -> dict[str, Any]:
    latency = window.latency
    p99_ms = latency.percentiles_ms([99])[0] if latency.total else None
    return {"seconds": window.seconds, "requests": latency.total, "errors": window.failed, "p99_ms": p99_ms}
