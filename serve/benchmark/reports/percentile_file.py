"""A level's latencies as HdrHistogram's percentile distribution text (.hgrm), which its plotters read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]  # (the package has no types)

from serve.benchmark.level import Level
from serve.benchmark.load.histogram import LatencyHistogram
from serve.benchmark.reports.report import Report
from serve.client.commands.atomic_file import written_whole

SIGNIFICANT_DIGITS = 3
TICKS_PER_HALF_DISTANCE = 5
NANOSECONDS_PER_MS = 1e6


def level_paths(path: Path, report: Report) -> list[tuple[Path, Level]]:
    """The file of each level: `path` itself where there is one, else NAME-16.hgrm, NAME-64.hgrm and so on.

    A load that was measured several times has NAME-16-1.hgrm, NAME-16-2.hgrm.
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
    return f"-{level.batch_size}rows"


def write_percentiles(path: Path, report: Report) -> None:
    """Write the distributions, in milliseconds.

    Raises:
        OSError: a file cannot be written; what stood there stays.
    """
    for where, level in level_paths(path, report):
        with written_whole(where) as file:
            file.write(percentile_text(level.histogram))


def percentile_text(latencies: LatencyHistogram) -> bytes:
    """Value, percentile, count and 1/(1-percentile), a line each, then mean, deviation, maximum and total, in milliseconds."""
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


def hdr_histogram(latencies: LatencyHistogram) -> HdrHistogram:
    """The same histogram as the library's, in nanoseconds."""
    histogram = HdrHistogram(1, max(2, latencies.max_ns), SIGNIFICANT_DIGITS)
    for value, count in zip(latencies.values_ns.tolist(), latencies.counts.tolist(), strict=True):
        histogram.record_value(min(value, latencies.max_ns), count)
    return histogram
