"""The report of a tuning: as one object, as a table for the terminal, and as JSON or a page with its Pareto front.

The JSON file holds one object: "model", "address" (null for a server of its own), "date", "command", "goal", "models" (the
tuned ones), "in_force" and "best" (medians, null if there is none), "nearest", "ended_early", "points" (all measurements),
"front" (those of the Pareto front), "refused" [{"choice", "reason"}] and "changes" [{"path", "diff"}]. A measurement has
"choice" (the settings of each tuned model) and the figures of `TuningPoint`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from halfserve.files.atomic_files import atomic_file
from halfserve.serve.tuning.config_edit import ConfigEdit
from halfserve.serve.tuning.search import TuningGoal, TuningOutcome
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
    from halfserve.serve.benchmark.page import as_page, html_table  # noqa: PLC0415  (matplotlib is slow to import)

    body = [
        f"<h1>{escape(report.title)}</h1>",
        f"<p>{escape(report.address or 'a server of its own')}, {report.date.isoformat(timespec='seconds')}</p>",
        f"<p><code>{escape(report.command)}</code></p>",
        *(f'<p class="warning">{escape(line)}</p>' for line in report.notes),
        html_table(report.table()),
        "<h2>Throughput and latency</h2>",
        _front_plot(report),
        *(f"<h2>{escape(str(edit.path))}</h2><pre>{escape(edit.diff)}</pre>" for edit in report.edits),
    ]
    return as_page(report.title, body)


def _front_plot(report: TuningReport) -> str:
    """Plot all measurements, the Pareto front, the limit, the settings in force and the chosen ones."""
    from halfserve.serve.benchmark.page import BLUE, GREY, ORANGE, as_svg, new_figure  # noqa: PLC0415  (see _page)

    outcome = report.outcome
    figure, axes = new_figure("throughput [requests/s]", f"latency p{report.goal.percent:g} [ms]")
    for points, line, colour, label in (
        (outcome.points, ".", GREY, "measured"),
        (outcome.front(), "o-", BLUE, "Pareto front"),
        ([outcome.start] if outcome.start else [], "s", ORANGE, "in force"),
        ([outcome.best] if outcome.best else [], "*", ORANGE, "best"),
    ):
        axes.plot([p.requests_per_second for p in points], [p.latency_ms for p in points], line, color=colour, label=label)
    axes.axhline(report.goal.max_ms, color=ORANGE, linestyle="--", label="limit")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    return as_svg(figure, axes)
