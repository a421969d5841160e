"""The files of a report: JSON, CSV, HTML page, HdrHistogram text and PNG plot."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from halfserve.files.atomic_files import atomic_file, checked_output
from halfserve.serve.benchmark import BenchmarkArgumentError
from halfserve.serve.benchmark.benchmark_report import BenchmarkReport, write_json
from halfserve.serve.benchmark.level import Level
from halfserve.serve.benchmark.load.spec import LatencyHistogram

SIGNIFICANT_DIGITS = 3
TICKS_PER_HALF_DISTANCE = 5
NANOSECONDS_PER_MS = 1e6
Writer = Callable[[BenchmarkReport], None]
WriteFile = Callable[[Path, BenchmarkReport], None]


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
    return f"-{level.batch_size}rows"


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


def report_writers(outputs: Mapping[str, Path | None]) -> list[Writer]:
    """One function per file to write; anything that would prevent the writing is found here, before the measurement.

    `outputs` has the path by option: "--output" (JSON), "--csv", "--html", "--hgrm", "--plot" (PNG).

    Raises:
        BenchmarkArgumentError: two options name the same file.
        OSError: a file cannot be written; the text names the option.
        ModuleNotFoundError: an optional package is missing.
    """
    given = {option: path for option, path in outputs.items() if path is not None}
    _check_apart(given)
    return [partial(_write_function(option), checked_output(path, option)) for option, path in given.items()]


def _check_apart(outputs: Mapping[str, Path]) -> None:
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path.exists() and not path.is_file():
            continue  # /dev/null and pipes take several outputs
        before = taken.setdefault(path.resolve(), option)
        if before != option:
            raise BenchmarkArgumentError(f"{before} and {option} {path}: are one file; expected a file for each")


def _write_function(option: str) -> WriteFile:
    # matplotlib and hdrhistogram are extras, and slow to import; an extra that is missing is found before the measurement.
    if option in ("--html", "--plot"):
        from halfserve.serve.benchmark.page import write_page, write_plot  # noqa: PLC0415  (an extra)

        return write_page if option == "--html" else write_plot
    if option == "--hgrm":
        import hdrh.histogram  # type: ignore[import-untyped]  # noqa: F401, PLC0415  (an extra)

        return write_percentiles
    return write_json if option == "--output" else write_csv
