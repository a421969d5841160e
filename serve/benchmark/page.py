"""Plots of a report, and a self-contained HTML page with inline SVG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.table import Table

from halfserve.files.atomic_files import atomic_file
from halfserve.serve.benchmark.benchmark_report import BenchmarkReport
from halfserve.serve.benchmark.level import Level
from halfserve.serve.benchmark.load.spec import LoadStatistics
from halfserve.serve.benchmark.tables import percentiles_table, tables

# Palette of Okabe and Ito, which is distinguishable for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE, GREY = PALETTE[0], PALETTE[1], "#555555"
DOTS_PER_INCH = 150
STAGES = {"queue": "#999999", "compute_input": "#56B4E9", "compute_infer": "#0072B2", "compute_output": "#009E73"}
POINTS = 400
MIN_WINDOWS = 3
ID_SALT = "halfserve"  # makes element names, and thus the file, reproducible
Curves = Mapping[str, Sequence[Level]]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 } caption { text-align: left; font-weight: bold }
th, td { padding: .2rem .7rem; text-align: right; white-space: pre-line; border-bottom: 1px solid #ddd }
th { border-bottom-color: #888 }
svg { max-width: 100%; height: auto } code { background: #f3f3f3; padding: .1rem .3rem } .warning { color: #b03a00 }
"""


def write_plot(path: Path, report: BenchmarkReport) -> None:
    """Draw a PNG with two panels over one axis of the load (log2): requests per second, and p50 and p99 latency.
    Raises OSError: the file cannot be written; an existing file stays unchanged.
    """
    # Without pyplot: no global state, no display needed.
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    throughput, latency = figure.subplots(2, 1, sharex=True)
    levels = sorted(report.levels, key=lambda level: level.load.amount)
    amounts = [level.load.amount for level in levels]
    _throughput_panel(throughput, amounts, [level.requests_per_second for level in levels])
    _latency_panel(latency, amounts, [level.latency.p50 for level in levels], [level.latency.p99 for level in levels])
    latency.set_xscale("log", base=2)
    ticks = sorted(set(amounts))
    latency.set_xticks(ticks, [f"{amount:g}" for amount in ticks])
    latency.minorticks_off()
    latency.set_xlabel("requests in flight" if levels[0].load.rate is None else "requests asked for [1/s]")
    figure.align_ylabels()
    figure.suptitle(f"{report.model} version {report.version}", fontsize=14, fontweight="bold")
    throughput.set_title(_subtitle(report), fontsize=9, color=GREY)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH)


def _throughput_panel(axes: Axes, amounts: list[float], per_second: list[float]) -> None:
    axes.plot(amounts, per_second, "o-", color=BLUE, linewidth=2)
    axes.set_ylabel("throughput [requests/s]")
    axes.set_ylim(0, max(per_second) * 1.18)
    for x, y in zip(amounts, per_second, strict=True):
        axes.annotate(f"{y:,.0f}", (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8, color=GREY)
    tidy(axes)


def _latency_panel(axes: Axes, amounts: list[float], p50_ms: list[float], p99_ms: list[float]) -> None:
    axes.plot(amounts, p99_ms, "s--", color=ORANGE, linewidth=2, label="p99")
    axes.plot(amounts, p50_ms, "o-", color=BLUE, linewidth=2, label="p50")
    axes.fill_between(amounts, p50_ms, p99_ms, color=ORANGE, alpha=0.12, linewidth=0)
    axes.set_ylabel("latency [ms]")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Remove grid lines and frames that carry no information."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)


def _subtitle(report: BenchmarkReport) -> str:
    rows = report.levels[0].batch_size
    facts: list[Any] = [report.provider, f"{rows:g} row{'s' * (rows > 1)} a request", report.address]
    return "  |  ".join(str(fact) for fact in facts if fact)


def curves_of(report: BenchmarkReport) -> dict[str, list[Level]]:
    """Return the levels to draw, by load target; for a comparison, those of the round with the median throughput."""
    if not report.comparison:
        return {report.model: list(report.levels)}
    curves: dict[str, list[Level]] = {}
    for compared in report.comparison:
        ordered = sorted(compared.rounds, key=lambda level: level.requests_per_second)
        curves.setdefault(compared.name, []).append(ordered[len(ordered) // 2])
    return curves


def throughput_latency(curves: Curves) -> str:
    """Plot the latencies p50 and p99 against the throughput reached, with one point per load."""
    figure, axes = new_figure("throughput [requests/s]; the numbers are the loads", "latency [ms]")
    for (name, levels), color in zip(curves.items(), cycle(PALETTE), strict=False):
        rates = [level.requests_per_second for level in levels]
        axes.plot(rates, [level.latency.p99 for level in levels], "s--", color=color, label=f"{name}, p99")
        axes.plot(rates, [level.latency.p50 for level in levels], "o-", color=color, label=f"{name}, p50")
        for level, rate in zip(levels, rates, strict=True):
            text = f"{level.load.amount:g}"
            axes.annotate(text, (rate, level.latency.p99), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    return as_svg(figure, axes)


def latency_percentiles(curves: Curves) -> str:
    """Plot latency against the percentile, as 1 - percentile on a log axis: each decade is one more nine."""
    figure, axes = new_figure("percentile", "latency [ms]")
    lines = [(f"{name}, {level.load.text}", level) for name, levels in curves.items() for level in levels]
    most = max(level.requests for _, level in lines)
    for (label, level), color in zip(lines, cycle(PALETTE), strict=False):
        inverse = np.geomspace(1, max(level.requests, 2), POINTS)
        latencies = level.histogram.percentiles_ms((100 * (1 - 1 / inverse)).tolist())
        axes.step(inverse, latencies, color=color, where="post", label=label)
    decades = [10**n for n in range(max(1, int(np.log10(max(most, 10))) + 1))]
    axes.set_xscale("log")
    axes.set_xticks(decades, [f"{100 * (1 - 1 / d):.6g} %" for d in decades])
    axes.minorticks_off()
    axes.set_yscale("log")
    return as_svg(figure, axes)


def over_time(curves: Curves) -> str | None:
    """Plot requests answered per second against the time of each load; None if there are too few slices."""
    lines = [
        (f"{name}, {level.load.text}", windows)
        for name, levels in curves.items()
        for level in levels
        if len(windows := _whole(level.windows)) >= MIN_WINDOWS
    ]
    if not lines:
        return None
    figure, axes = new_figure("time since the load began [s]", "throughput [requests/s]")
    for (label, windows), color in zip(lines, cycle(PALETTE), strict=False):
        edges = np.cumsum([0.0, *(window.seconds for window in windows)])
        rates = [window.latency.total / window.seconds for window in windows]
        axes.stairs(rates, edges, color=color, label=label, baseline=None)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    return as_svg(figure, axes)


def _whole(windows: Sequence[LoadStatistics]) -> list[LoadStatistics]:
    """Return the slices without the short ones at the end, which only wait for the last requests and so have no rate."""
    longest = max((window.seconds for window in windows), default=0.0)
    return [window for window in windows if window.seconds > longest / 2]


def server_split(curves: Curves) -> str | None:
    """Plot a bar per load: a request's mean time in the server by stage; None if no server has statistics."""
    lines = [
        (f"{name}\n{level.load.amount:g}" if len(curves) > 1 else f"{level.load.amount:g}", level.server.split_ms)
        for name, levels in curves.items()
        for level in levels
        if level.server is not None
    ]
    if not lines:
        return None
    figure, axes = new_figure("load", "mean time in the server [ms]")
    places, bottom = np.arange(len(lines)), np.zeros(len(lines))
    for stage, color in STAGES.items():
        heights = np.array([split[stage] or 0.0 for _, split in lines])
        axes.bar(places, heights, bottom=bottom, color=color, label=stage.replace("_", " "), width=0.6)
        bottom += heights
    axes.set_xticks(places, [label for label, _ in lines], fontsize=8)
    return as_svg(figure, axes)


def new_figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Return a figure of a page, with one panel."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def as_svg(figure: Figure, axes: Axes) -> str:
    """Return a figure as an element of a page, the same at each call."""
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": ID_SALT, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    # The XML prolog before the element is not allowed in an HTML page.
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def write_page(path: Path, report: BenchmarkReport) -> None:
    """Write the page. Raises OSError: the file cannot be written; an existing file stays unchanged."""
    content = page(report).encode()
    with atomic_file(path) as file:
        file.write(content)


def page(report: BenchmarkReport) -> str:
    curves, facts = curves_of(report), report.to_json()
    split, timeline = server_split(curves), over_time(curves)
    machine = facts["machine"]
    measured_on = f"{machine['platform']}, {machine['cpus']} CPU cores"
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f"<p>{escape(report.address)}, {escape(facts['date'])}; load from {escape(measured_on)}</p>",
        f"<p><code>{escape(report.command)}</code></p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        *(f'<p class="warning">{escape(line)}</p>' for line in report.doubts()),
        *(html_table(table) for table in tables(report)),
        *(f"<p>{escape(line)}</p>" for line in report.failures()),
        *_section("Throughput and latency", throughput_latency(curves)),
        *_section("Latency, percentile by percentile", latency_percentiles(curves)),
        *(html_table(percentiles_table(name, levels)) for name, levels in curves.items()),
        *(_section("Where the time goes in the server", split) if split else []),
        *(_section("Throughput over time", timeline) if timeline else []),
    ]
    return as_page(report.title, body)


def as_page(title: str, body: Sequence[str]) -> str:
    """Return a whole page with these elements."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _section(heading: str, svg: str) -> list[str]:
    return [f"<h2>{escape(heading)}</h2>", svg]


def html_table(table: Table) -> str:
    """Return a table of the terminal as an element of a page."""
    text = io.StringIO()
    text.write(f"<table><caption>{escape(str(table.title))}</caption><tr>")
    text.writelines(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    text.write("</tr>")
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        text.write("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    text.write("</table>")
    return text.getvalue()
