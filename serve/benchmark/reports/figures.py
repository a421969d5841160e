"""The page's figures as SVG: latency against throughput, its whole distribution, and where the server's time goes."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from serve.benchmark.level import Level
from serve.benchmark.load.order import Tally
from serve.benchmark.reports.plot import tidy
from serve.benchmark.reports.report import Report

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STAGES = {"queue": "#999999", "compute_input": "#56B4E9", "compute_infer": "#0072B2", "compute_output": "#009E73"}
POINTS = 400
MIN_WINDOWS = 3
ID_SALT = "halfserve"  # element names would be random, and the same report another file each time

Curves = Mapping[str, Sequence[Level]]


def curves_of(report: Report) -> dict[str, list[Level]]:
    """The levels to draw, by contestant: of a comparison those of the round whose throughput is the median one."""
    if not report.comparison:
        return {report.model: list(report.levels)}
    curves: dict[str, list[Level]] = {}
    for compared in report.comparison:
        ordered = sorted(compared.rounds, key=lambda level: level.requests_per_second)
        curves.setdefault(compared.name, []).append(ordered[len(ordered) // 2])
    return curves


def throughput_latency(curves: Curves) -> str:
    """p50 and p99 against the throughput reached, a point per load."""

    def draw(axes: Axes) -> None:
        for (name, levels), color in zip(curves.items(), _colors(), strict=False):
            rates = [level.requests_per_second for level in levels]
            axes.plot(rates, [level.latency.p99 for level in levels], "s--", color=color, label=f"{name}, p99")
            axes.plot(rates, [level.latency.p50 for level in levels], "o-", color=color, label=f"{name}, p50")
            for level, rate in zip(levels, rates, strict=True):
                text = f"{level.load.amount:g}"
                axes.annotate(text, (rate, level.latency.p99), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        axes.set_xlabel("throughput [requests/s]; the numbers are the loads")
        axes.set_ylabel("latency [ms]")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.legend(frameon=False, fontsize=8)

    return _svg(draw)


def latency_percentiles(curves: Curves) -> str:
    """The latency at every percentile, which is drawn by 1 - percentile on a log axis: each decade is one more nine."""

    def draw(axes: Axes) -> None:
        lines = [(f"{name}, {level.load.text}", level) for name, levels in curves.items() for level in levels]
        most = max(level.requests for _, level in lines)
        for (label, level), color in zip(lines, _colors(), strict=False):
            inverse = np.geomspace(1, max(level.requests, 2), POINTS)
            latencies = level.histogram.percentiles_ms((100 * (1 - 1 / inverse)).tolist())
            axes.step(inverse, latencies, color=color, where="post", label=label)
        decades = [10**n for n in range(max(1, int(np.log10(max(most, 10))) + 1))]
        axes.set_xscale("log")
        axes.set_xticks(decades, [f"{100 * (1 - 1 / d):.6g} %" for d in decades])
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.set_xlabel("percentile")
        axes.set_ylabel("latency [ms]")
        axes.legend(frameon=False, fontsize=8)

    return _svg(draw)


def over_time(curves: Curves) -> str | None:
    """Requests answered per second, slice by slice of each load's time; None where there are not enough slices to see any."""
    lines = [
        (f"{name}, {level.load.text}", windows)
        for name, levels in curves.items()
        for level in levels
        if len(windows := _whole(level.windows)) >= MIN_WINDOWS
    ]
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        for (label, windows), color in zip(lines, _colors(), strict=False):
            edges = np.cumsum([0.0, *(window.seconds for window in windows)])
            axes.stairs(
                [window.latency.total / window.seconds for window in windows], edges, color=color, label=label, baseline=None
            )
        axes.set_xlabel("time since the load began [s]")
        axes.set_ylabel("throughput [requests/s]")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.legend(frameon=False, fontsize=8)

    return _svg(draw)


def _whole(windows: Sequence[Tally]) -> list[Tally]:
    """Without the slices that are too short to have a rate: those in which the last requests were waited for."""
    longest = max((window.seconds for window in windows), default=0.0)
    return [window for window in windows if window.seconds > longest / 2]


def server_split(curves: Curves) -> str | None:
    """A bar per load: the mean time of a request in the server, stage by stage; None where no server tells."""
    lines = [
        (f"{name}\n{level.load.amount:g}" if len(curves) > 1 else f"{level.load.amount:g}", level.server.split_ms)
        for name, levels in curves.items()
        for level in levels
        if level.server is not None
    ]
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        places, bottom = np.arange(len(lines)), np.zeros(len(lines))
        for stage, color in STAGES.items():
            heights = np.array([split[stage] or 0.0 for _, split in lines])
            axes.bar(places, heights, bottom=bottom, color=color, label=stage.replace("_", " "), width=0.6)
            bottom += heights
        axes.set_xticks(places, [label for label, _ in lines], fontsize=8)
        axes.set_xlabel("load")
        axes.set_ylabel("mean time in the server [ms]")
        axes.legend(frameon=False, fontsize=8)

    return _svg(draw)


def _colors() -> list[str]:
    return list(PALETTE) * 20


def _svg(draw: Callable[[Axes], None]) -> str:
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    draw(axes)
    tidy(axes)
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": ID_SALT, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    # What stands before the element belongs to a file of its own, not into a page.
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
