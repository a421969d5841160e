"""A benchmark report: as one object, and its files: bench.json, CSV, HdrHistogram text; page.py has the page.

bench.json holds one object:

- "model", "version", "address"; "provider": the execution provider, null if the server does not say; "notes": captured
  requests that were sent, sizes that bench chose, and other changes of the requests
- "batch_size": rows per request of the first level; "date": ISO 8601, UTC; "command"
- "machine": {"platform", "cpus", "python"} of the load generator
- "goal", "best": for a search, the latency limit, and the index in "levels" of the highest load that met it; else null
- "levels": one per load, in the order measured:
    - "concurrency": requests in flight, or "rate": requests per second; the other is null. "speed": of a replay of captured
      arrivals, 1 for as they were captured; else null. "batch_size": rows per request, the mean of captured ones
    - "requests": successful requests; "errors": failed ones; "errors_by_status": {gRPC status, or "HTTP 429": count};
      "error_messages": the first message of each status
    - "seconds", "requests_per_second", "rows_per_second"
    - "goodput_per_second": requests answered within the given latency limit, null without one
    - "latency_ms": {"min", "mean", "p50", "p90", "p95", "p99", "p99.9", "max"} of the successful ones; at a rate it counts
      from the intended sending time
    - "mean_batch_size": rows per batch in the server
    - "server_ms": {"queue", "compute", "compute_input", "compute_infer", "compute_output"}: means per request; "compute" is
      the sum of the last three
    - "models": [{"model", "requests", "latency_ms"}]
    - "generator": {"sent", "busy": fraction of its time, "late_p99_ms": its own delay at a rate, "held_back"}
    - "windows": [{"seconds", "requests", "errors", "p99_ms"}]: slices of the time, in their order
    - "stable": whether the last windows agreed, null if not required; "ended_early": the reason, or null
- "comparison": one object per load and target: "name", "concurrency" or "rate", "requests_per_second", "p50_ms", "p99_ms",
  "rate_ratio", "p99_ratio" (each {"median", "low", "high"} over the rounds; the ratios are to the first target),
  "mean_batch_size", "errors", "rounds": [level]
- "differences": one object per target after the first: "name"; "requests": number of requests that both were asked once;
  "differing": those whose answers differ; "failed": those that only one side answered; "outputs": [{"output", "max_abs",
  "scaled": the error over the answer's largest value, "mismatched", "differing": answers, "rows" with classes, "class_changes":
  those with another argmax, "agreement": the others' share, null without classes}]; "not_compared": outputs that only one side
  has

Where the server keeps no statistics, or was restarted during a load, its figures are null.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from halfserve.files.atomic_files import atomic_file
from halfserve.serve.benchmark.comparison import ComparedLevel, Differences
from halfserve.serve.benchmark.level import Level
from halfserve.serve.benchmark.load.spec import LatencyHistogram
from halfserve.serve.benchmark.measurement import Goal, best_of


@dataclass(frozen=True, kw_only=True)
class BenchmarkReport:
    """Results of a benchmark, and the conditions of the measurement.

    Attributes:
        model: name of the model, or several joined by "+".
        version: version that answered, or several.
        address: address of the server.
        provider: execution provider of the model, such as "CUDAExecutionProvider"; None if the server does not say.
        command: command line.
        notes: captured requests that were sent, sizes that were chosen, and other changes of the requests, a line each.
        levels: one level per load, in the order measured; for a comparison, those of the first target's first round.
        goal: latency limit of a search; None without one.
        comparison: results of the compared load targets; empty without a comparison.
        differences: differences between their answers.
        date: time of the measurement, in UTC.
    """

    model: str
    version: str
    address: str
    provider: str | None
    command: str
    notes: Sequence[str] = ()
    levels: Sequence[Level] = ()
    goal: Goal | None = None
    comparison: Sequence[ComparedLevel] = ()
    differences: Sequence[Differences] = ()
    date: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def best(self) -> Level | None:
        """The level with the highest load that meets the goal of a search; None without a search."""
        return None if self.goal is None else best_of(self.levels, self.goal)

    @property
    def title(self) -> str:
        sizes = sorted({level.batch_size for level in self.levels})
        rows = "" if sizes in ([], [1]) else f", {'/'.join(f'{size:g}' for size in sizes)} rows a request"
        return f"{self.model} version {self.version} on {self.provider or self.address}{rows}"

    def to_json(self) -> dict[str, Any]:
        """Return the object of bench.json, as this module's docstring describes it."""
        best = self.best
        return {
            "model": self.model,
            "version": self.version,
            "address": self.address,
            "provider": self.provider,
            "batch_size": self.levels[0].batch_size if self.levels else None,
            "date": self.date.isoformat(timespec="seconds"),
            "command": self.command,
            "notes": list(self.notes),
            "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
            "goal": self.goal and {"percent": self.goal.percent, "max_ms": self.goal.max_ms},
            "best": None if best is None else list(self.levels).index(best),
            "levels": [level.to_json() for level in self.levels],
            "comparison": [compared.to_json() for compared in self.comparison],
            "differences": [difference.to_json() for difference in self.differences],
        }

    @property
    def measured(self) -> list[Level]:
        """All levels, including every round of a comparison."""
        return [level for compared in self.comparison for level in compared.rounds] or list(self.levels)

    def doubts(self) -> list[str]:
        """Reasons to doubt figures of this report, one line each with the loads that they concern."""
        loads: dict[str, dict[str, None]] = {}
        for level in self.measured:
            for doubt in level.doubts():
                loads.setdefault(doubt, {})[level.load.text] = None
        return [f"warning: at {', '.join(texts)}: {doubt}" for doubt, texts in loads.items()]

    def failures(self) -> list[str]:
        """Return one line per load and gRPC status of failed requests."""
        return list(dict.fromkeys(line for level in self.measured for line in level.failures()))


def write_json(path: Path, report: BenchmarkReport) -> None:
    """Write bench.json. Raises OSError: the file cannot be written; an existing file stays unchanged."""
    with atomic_file(path) as file:
        file.write(json.dumps(report.to_json(), indent=2, allow_nan=False).encode() + b"\n")


SIGNIFICANT_DIGITS = 3
TICKS_PER_HALF_DISTANCE = 5
NANOSECONDS_PER_MS = 1e6


def write_csv(path: Path, report: BenchmarkReport) -> None:
    """Write a table of the levels with a header line; times are in milliseconds, and values that the server lacks are empty.
    Raises OSError: the file cannot be written; an existing file stays unchanged.
    """
    text = io.StringIO(newline="")
    lines = list(_lines(report))
    writer = csv.DictWriter(text, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode())


def _lines(report: BenchmarkReport) -> Iterator[dict[str, Any]]:
    if not report.comparison:
        for level in report.levels:
            yield _line(f"{report.address}/{report.model}", 1, level)
    for compared in report.comparison:
        for number, level in enumerate(compared.rounds, 1):
            yield _line(compared.name, number, level)


def _line(name: str, number: int, level: Level) -> dict[str, Any]:
    figures = level.to_json()
    keys = ("concurrency", "rate", "batch_size", "requests", "errors", "seconds", "requests_per_second", "rows_per_second")
    return {
        "name": name,
        "round": number,
        **{key: figures[key] for key in (*keys, "goodput_per_second")},
        **{f"{key}_ms": value for key, value in figures["latency_ms"].items()},
        "mean_batch_size": figures["mean_batch_size"],
        **{f"server_{key}_ms": value for key, value in figures["server_ms"].items()},
    }


def level_paths(path: Path, report: BenchmarkReport) -> list[tuple[Path, Level]]:
    """Path of each level's file: `path` itself for a single level, else NAME-16.hgrm, NAME-64.hgrm and so on.

    The files of a load that was measured several times are NAME-16-1.hgrm, NAME-16-2.hgrm.
    """
    if len(report.levels) == 1:
        return [(path, report.levels[0])]
    several = len({level.batch_size for level in report.levels}) > 1
    names = [f"{path.stem}{_rows(level) if several else ''}-{level.load.amount:.15g}" for level in report.levels]
    for name, count in Counter(names).items():
        if count > 1:
            numbers = iter(range(1, count + 1))
            names = [f"{one}-{next(numbers)}" if one == name else one for one in names]
    return [(path.with_name(f"{name}{path.suffix}"), level) for name, level in zip(names, report.levels, strict=True)]


def _rows(level: Level) -> str:
    return f"-{level.batch_size:g}rows"


def write_percentiles(path: Path, report: BenchmarkReport) -> None:
    """Write the distributions in milliseconds, as HdrHistogram's percentile text, which its plotters read.
    Raises OSError: a file cannot be written; an existing file stays unchanged.
    """
    for where, level in level_paths(path, report):
        with atomic_file(where) as file:
            file.write(percentile_text(level.histogram))


def percentile_text(latencies: LatencyHistogram) -> bytes:
    """Lines of value, percentile, count and 1/(1-percentile), then mean, deviation, maximum and total, in milliseconds."""
    histogram = hdr_histogram(latencies)
    lines = [f"{'Value':>12} {'Percentile':>14} {'TotalCount':>10} {'1/(1-Percentile)':>14}", ""]
    for point in histogram.get_percentile_iterator(TICKS_PER_HALF_DISTANCE):
        fraction = point.percentile_level_iterated_to / 100
        line = f"{_ms(point.value_iterated_to):12.3f} {fraction:2.12f} {point.total_count_to_this_value:10d}"
        lines.append(line if fraction >= 1 else f"{line} {1 / (1 - fraction):14.2f}")
    mean, deviation = _ms(histogram.get_mean_value()), _ms(histogram.get_stddev())
    largest, total = _ms(histogram.get_max_value()), histogram.get_total_count()
    lines.append(f"#[Mean    = {mean:12.3f}, StdDeviation   = {deviation:12.3f}]")
    lines.append(f"#[Max     = {largest:12.3f}, Total count    = {total:12d}]")
    lines.append(f"#[Buckets = {histogram.bucket_count:12d}, SubBuckets     = {histogram.sub_bucket_count:12d}]")
    return "\n".join([*lines, ""]).encode()


def _ms(nanoseconds: float) -> float:
    return nanoseconds / NANOSECONDS_PER_MS


def hdr_histogram(latencies: LatencyHistogram) -> Any:
    """Convert to an hdrh.histogram.HdrHistogram in nanoseconds."""
    from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]  # noqa: PLC0415  (an extra)

    histogram = HdrHistogram(1, max(2, latencies.max_ns), SIGNIFICANT_DIGITS)
    for value, count in zip(latencies.values_ns.tolist(), latencies.counts.tolist(), strict=True):
        histogram.record_value(min(value, latencies.max_ns), count)
    return histogram
