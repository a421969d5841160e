from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from serve.benchmark.report import write_json
from tests.serve.benchmark.levels import level, report


def printed(width: int = 80, **errors: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report(level(2), level(16, errors)).table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_file_says_what_was_measured_where_and_how(tmp_path: Path) -> None:
    write_json(tmp_path / "bench.json", report(level()).to_json())
    figures = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    assert list(figures) == ["model", "version", "address", "provider", "batch_size", "date", "command", "machine", "levels"]
    assert (figures["model"], figures["version"], figures["batch_size"]) == ("mlp", "3", 2)
    assert abs(datetime.fromisoformat(figures["date"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert figures["machine"].keys() == {"platform", "cpus", "python"}
    assert [one["concurrency"] for one in figures["levels"]] == [2]


def test_the_table_fits_a_terminal() -> None:
    text = printed()
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["2", "2", "4", "2.00", "4.00", "4.00", "4.00", "0.50", "1.50", "0"] in lines


def test_errors_are_shown_by_status() -> None:
    assert "5 INTERNAL" in printed(width=100, INTERNAL=5)


def test_foreign_load_is_told() -> None:
    assert report(level()).warnings() == []
    server = level().server
    assert server is not None
    (warning,) = report(level(8, server=server + server)).warnings()
    assert "at concurrency 8 the server answered 8 requests, of which 4 were ours" in warning
