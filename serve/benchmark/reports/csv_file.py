"""A measurement as CSV: one line per load (and contestant and round)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve.benchmark.level import Level
from serve.benchmark.reports.report import Report
from serve.client.commands.atomic_file import written_whole


def write_csv(path: Path, report: Report) -> None:
    """Write the levels as a table with one header line; times are milliseconds, empty cells are what the server does not tell.

    Raises:
        OSError: the file cannot be written; what stood there stays.
    """
    text = io.StringIO(newline="")
    lines = list(_lines(report))
    writer = csv.DictWriter(text, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    with written_whole(path) as file:
        file.write(text.getvalue().encode())


def _lines(report: Report) -> Iterator[dict[str, Any]]:
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
