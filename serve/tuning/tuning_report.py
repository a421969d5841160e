"""The report of a tuning: as one object, as a table for the terminal, and as JSON or a page with its Pareto front.

The JSON file holds one object: "model", "address" (null for a server of its own), "date", "command", "goal", "models" (the
tuned ones), "in_force" and "best" (medians, null if there is none), "nearest", "ended_early", "points" (all measurements),
"front" (those of the Pareto front), "refused" [{"choice", "reason"}] and "changes" [{"path", "diff"}]. A measurement has
"choice" (the settings of each tuned model) and the figures of `TuningPoint`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from halfserve.files.atomic_files import atomic_file
from halfserve.reports.charts import GREY, Axis, Chart
from halfserve.reports.page import escaped, paragraph, report_page, section
from halfserve.serve.benchmark.page import html_table
from halfserve.serve.tuning.config_edit import ConfigEdit
from halfserve.serve.tuning.search import TuningGoal, TuningOutcome, TuningPoint
from halfserve.serve.tuning.settings import choice_text


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """Results of a tuning, and its conditions."""

    model: str  # name of the model
    models: Sequence[str]  # names of the tuned models: itself, or an ensemble's steps
    address: str | None  # address of the server; None for one of the tuning's own
    command: str  # command line
    goal: TuningGoal  # the limit
    outcome: TuningOutcome
    edits: Sequence[ConfigEdit] = ()  # changes of files that the result asks for
    notes: Sequence[str] = ()  # remarks about the result, one line each
    date: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def title(self) -> str:
        return f"{self.model}: p{self.goal.percent:g} within {self.goal.max_ms:g} ms"

    def to_json(self) -> dict[str, Any]:
        """Return the object of the JSON file, as this module's docstring describes it."""
        outcome = self.outcome
        return {
            "model": self.model,
            "models": list(self.models),
            "address": self.address,
            "date": self.date.isoformat(timespec="seconds"),
            "command": self.command,
            "goal": asdict(self.goal),
            "in_force": outcome.start and asdict(outcome.start),
            "best": outcome.best and asdict(outcome.best),
            "nearest": asdict(outcome.nearest),
            "ended_early": outcome.ended_early,
            "points": [asdict(point) for point in outcome.points],
            "front": [asdict(point) for point in outcome.front()],
            "refused": [{"choice": [*map(asdict, choice)], "reason": reason} for choice, reason in outcome.refused.items()],
            "changes": [{"path": str(edit.path), "diff": edit.diff} for edit in self.edits],
        }

    def table(self) -> Table:
        """Return the settings in force and the chosen ones, then the Pareto front."""
        outcome = self.outcome
        table = Table(title=self.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        for heading in ("", "settings", "in flight", "requests/s", f"p{self.goal.percent:g} ms"):
            table.add_column(heading, justify="left" if heading in ("", "settings") else "right")
        table.caption = "front: no other measurement had both more requests/s and a lower latency"
        table.caption_justify = "left"
        rows = [("in force", outcome.start), ("best" if outcome.best else "nearest", outcome.best or outcome.nearest)]
        for name, point in [*rows, *(("front", point) for point in outcome.front())]:
            if point is not None:
                figures = (str(point.concurrency), f"{point.requests_per_second:,.0f}", f"{point.latency_ms:.2f}")
                table.add_row(name, choice_text(point.choice), *figures)
        return table


def write_report(path: Path, report: TuningReport) -> None:
    """Write a page to a path that ends in .html, else JSON. Raises OSError: it cannot be written; a file there stays."""
    text = _page(report) if path.suffix == ".html" else json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode())


def _page(report: TuningReport) -> str:
    return report_page(f"{report.title}: tuning", _sections(report))


def _sections(report: TuningReport) -> Iterator[str]:
    yield f"<h1>Tuning of {escaped(report.title)}</h1>"
    yield paragraph(f"{report.address or 'a server of its own'}, {report.date.isoformat(timespec='seconds')}", "quiet")
    yield f"<p><code>{escaped(report.command)}</code></p>"
    yield from (paragraph(line, "warning") for line in report.notes)
    yield html_table(report.table(), report.title)
    yield section("Throughput and latency", _front_chart(report))
    for edit in report.edits:
        yield section(str(edit.path), f'<pre tabindex="0">{escaped(edit.diff)}</pre>')


def _front_chart(report: TuningReport) -> str:
    """Plot all measurements, the Pareto front, the limit, the settings in force and the chosen ones."""
    outcome, limit_ms = report.outcome, report.goal.max_ms
    shown = [*outcome.points, *filter(None, (outcome.start, outcome.best))]
    rates = Axis.linear("requests/s", (point.requests_per_second for point in shown))
    latencies = Axis.log("ms", [limit_ms, *(point.latency_ms for point in shown)])
    chart = Chart(f"Latency p{report.goal.percent:g} by throughput", rates, latencies)
    chart.dots("measured", map(_place, outcome.points), GREY, radius=2)
    chart.curve("Pareto front: no other settings are better in both", map(_place, outcome.front()), 0, dots=True)
    if outcome.start:
        chart.dots("in force", [_place(outcome.start)], 2, radius=5)
    if outcome.best:
        chart.dots("best", [_place(outcome.best)], 1, radius=5)
    chart.limit(name=f"limit, {limit_ms:g} ms", y=limit_ms)
    return chart.figure()


def _place(point: TuningPoint) -> tuple[float, float]:
    return point.requests_per_second, point.latency_ms
