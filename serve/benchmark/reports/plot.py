"""A sweep as a picture: throughput and latency against the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from serve.benchmark.reports.report import Report
from serve.client.commands.atomic_file import written_whole

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
DOTS_PER_INCH = 150


def write_plot(path: Path, report: Report) -> None:
    """Draw a PNG with two panels over one axis of the load (log2): requests per second, and p50 and p99 latency.

    Raises:
        OSError: the file cannot be written; what stood there stays.
    """
    # Without pyplot: no global state, and no display is looked for.
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
    with written_whole(path) as file:
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
    """Take away what carries no information."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)


def _subtitle(report: Report) -> str:
    rows = report.levels[0].batch_size
    facts: list[Any] = [report.provider, f"{rows} row{'s' * (rows > 1)} a request", report.address]
    return "  |  ".join(str(fact) for fact in facts if fact)
