"""The page of a report: tables, and charts of throughput and latency."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from halfserve.files.atomic_files import atomic_file
from halfserve.reports.charts import Axis, Chart, charts, stacked_bars
from halfserve.reports.page import escaped, paragraph, report_page, section, table
from halfserve.serve.benchmark.benchmark_report import BenchmarkReport
from halfserve.serve.benchmark.level import Level
from halfserve.serve.benchmark.load.spec import LoadStatistics
from halfserve.serve.benchmark.tables import percentiles_table, tables

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
POINTS = 400
MIN_WINDOWS = 3
Curves = Mapping[str, Sequence[Level]]


def curves_of(report: BenchmarkReport) -> dict[str, list[Level]]:
    """Return the levels to draw, by load target; for a comparison, those of the round with the median throughput."""
    if not report.comparison:
        return {report.model: list(report.levels)}
    curves: dict[str, list[Level]] = {}
    for compared in report.comparison:
        ordered = sorted(compared.rounds, key=lambda level: level.requests_per_second)
        curves.setdefault(compared.name, []).append(ordered[len(ordered) // 2])
    return curves


def throughput(curves: Curves) -> str:
    """Plot the throughput against the load."""
    chart = _over_loads("Throughput by load", "requests/s", curves, [level.requests_per_second for level in _levels(curves)])
    for series, (name, levels) in enumerate(curves.items()):
        points = sorted((level.load.amount, level.requests_per_second) for level in levels)
        chart.curve(name, points, series, dots=True)
    return chart.figure()


def latency(curves: Curves) -> str:
    """Plot the latencies p50 and p99 against the load."""
    chart = _over_loads("Latency by load", "ms", curves, [level.latency.p99 for level in _levels(curves)])
    for series, (name, levels) in enumerate(curves.items()):
        ordered = sorted(levels, key=lambda level: level.load.amount)
        chart.curve(
            f"{name}, p99", [(level.load.amount, level.latency.p99) for level in ordered], series, dashed=True, dots=True
        )
        chart.curve(f"{name}, p50", [(level.load.amount, level.latency.p50) for level in ordered], series, dots=True)
    return chart.figure()


def _over_loads(title: str, unit: str, curves: Curves, values: Sequence[float]) -> Chart:
    amounts = sorted({level.load.amount for level in _levels(curves)})
    load = "requests in flight" if _levels(curves)[0].load.rate is None else "requests asked for per second"
    return Chart(title, Axis.log(load, amounts, base=2, ticks=amounts), Axis.linear(unit, values))


def _levels(curves: Curves) -> list[Level]:
    return [level for levels in curves.values() for level in levels]


def throughput_latency(curves: Curves) -> str:
    """Plot the latency p99 against the throughput reached, with one point per load."""
    levels = _levels(curves)
    rates, worst = Axis.linear("requests/s", [o.requests_per_second for o in levels]), [o.latency.p99 for o in levels]
    chart = Chart("Latency p99 by throughput; the numbers are the loads", rates, Axis.linear("ms", worst))
    for series, (name, own) in enumerate(curves.items()):
        points = [(level.requests_per_second, level.latency.p99) for level in own]
        chart.curve(name, points, series, dots=True)
        for level, point in zip(own, points, strict=True):
            chart.text(point, f"{level.load.amount:g}")
    return chart.figure()


def latency_percentiles(curves: Curves) -> str:
    """Plot latency against the percentile, as 1 - percentile on a log axis: each decade is one more nine."""
    lines = [(f"{name}, {level.load.text}", level) for name, levels in curves.items() for level in levels]
    drawn = []
    for label, level in lines:
        inverse = np.geomspace(1, max(level.requests, 2), POINTS)
        values = level.histogram.percentiles_ms((100 * (1 - 1 / inverse)).tolist())
        drawn.append((label, list(zip(inverse.tolist(), values, strict=True))))
    most = max(10, *(level.requests for _, level in lines))
    decades = [10**n for n in range(int(math.log10(most)) + 1)]
    nines = [(float(d), f"{100 * (1 - 1 / d):.6g}%") for d in decades]
    percentiles = Axis(label="percentile", low=1, high=float(most), ticks=nines, logarithmic=True)
    chart = Chart("Latency by percentile", percentiles, Axis.log("ms", [y for _, points in drawn for _, y in points]))
    for series, (label, points) in enumerate(drawn):
        chart.steps(label, points, series)
    return chart.figure()


def over_time(curves: Curves) -> str:
    """Plot requests answered per second against the time of each load; nothing if there are too few slices."""
    lines = [
        (f"{name}, {level.load.text}", windows)
        for name, levels in curves.items()
        for level in levels
        if len(windows := _whole(level.windows)) >= MIN_WINDOWS
    ]
    drawn = []
    for label, windows in lines:
        edges = np.cumsum([0.0, *(window.seconds for window in windows)]).tolist()
        rates = [window.latency.total / window.seconds for window in windows]
        drawn.append((label, list(zip(edges, [*rates, rates[-1]], strict=True))))
    if not drawn:
        return ""
    points = [point for _, own in drawn for point in own]
    time, rate = Axis.linear("seconds since the load began", (x for x, _ in points)), (y for _, y in points)
    chart = Chart("Throughput over time", time, Axis.linear("requests/s", rate))
    for series, (label, own) in enumerate(drawn):
        chart.steps(label, own, series)
    return chart.figure()


def _whole(windows: Sequence[LoadStatistics]) -> list[LoadStatistics]:
    """Return the slices without the short ones at the end, which only wait for the last requests and so have no rate."""
    longest = max((window.seconds for window in windows), default=0.0)
    return [window for window in windows if window.seconds > longest / 2]


def server_split(curves: Curves) -> str:
    """Draw a bar per load: a request's mean time in the server by stage; nothing if no server has statistics."""
    rows = [
        (f"{name}, {level.load.text}" if len(curves) > 1 else level.load.text, level.server.split_ms)
        for name, levels in curves.items()
        for level in levels
        if level.server is not None
    ]
    if not rows:
        return ""
    bars = [(label, [split[stage] or 0.0 for stage in STAGES]) for label, split in rows]
    return stacked_bars("Mean time of a request in the server", [stage.replace("_", " ") for stage in STAGES], bars, "ms")


def write_page(path: Path, report: BenchmarkReport) -> None:
    """Write the page. Raises OSError: the file cannot be written; an existing file stays unchanged."""
    content = page(report).encode()
    with atomic_file(path) as file:
        file.write(content)


def page(report: BenchmarkReport) -> str:
    return report_page(f"{report.title}: benchmark", _sections(report))


def _sections(report: BenchmarkReport) -> Iterator[str]:
    curves, facts = curves_of(report), report.to_json()
    machine = facts["machine"]
    yield f"<h1>Benchmark of {escaped(report.title)}</h1>"
    measured_on = f"load from {machine['platform']}, {machine['cpus']} CPU cores"
    yield paragraph(f"{report.address}, {facts['date']}; {measured_on}", "quiet")
    yield f"<p><code>{escaped(report.command)}</code></p>"
    yield from (paragraph(note) for note in report.notes)
    yield from (paragraph(line, "warning") for line in report.doubts())
    yield from (html_table(made, report.title) for made in tables(report))
    yield from (paragraph(line) for line in report.failures())
    drawn = [throughput(curves), latency(curves), throughput_latency(curves), latency_percentiles(curves)]
    yield section("Charts", charts([*drawn, over_time(curves), server_split(curves)]))
    percentiles = "".join(html_table(percentiles_table(name, levels)) for name, levels in curves.items())
    yield section("Latency, percentile by percentile", percentiles)


def html_table(made: Table, heading: str = "") -> str:
    """Return a table of the terminal as an element of a page, with its caption below; a title like `heading` is left out."""
    rows = zip(*(map(str, column.cells) for column in made.columns), strict=True)
    numbers = [index for index, column in enumerate(made.columns) if column.justify == "right"]
    names = [str(column.header) for column in made.columns]
    drawn = table(names, list(rows), numbers=numbers, caption="" if made.title == heading else str(made.title))
    return drawn + "".join(paragraph(line, "quiet") for line in str(made.caption or "").splitlines())
