from __future__ import annotations

import io

import pytest
from rich.console import Console

from serve.benchmark.level import Level
from serve.benchmark.load.order import Tally
from serve.benchmark.loads import Load
from serve.benchmark.reports.report import Report
from serve.benchmark.reports.tables import tables
from serve.benchmark.sweep import Goal
from tests.serve.benchmark.levels import SERVER, comparison, histogram, level, report


def printed(made: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables(made):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_sweep_fits_a_terminal() -> None:
    text = printed(report(level(2), level(16)))
    assert "…" not in text
    assert ["2", "2", "4", "2.00", "4.00", "4.00", "4.00", "0.50", "1.50", "0"] in cells(text)


def test_rates_goodput_and_errors_have_their_columns() -> None:
    text = printed(report(level(load=Load(rate=7.0), errors={"INTERNAL": 5}, goodput_ms=2.5)))
    assert ["7", "2", "4", "1", "2.00", "4.00", "4.00", "4.00", "0.50", "1.50", "5"] in cells(text)
    assert "asked" in text


def test_a_comparison_fits_a_terminal() -> None:
    text = printed(report(level(1), comparison=comparison("digits", "digits_fp32")))
    assert "…" not in text
    assert ["1", "digits", "2", "2.00", "4.00", "4.0", "0"] in cells(text)
    assert ["1", "digits_fp32", "2", "2.00", "4.00", "4.0", "1.00", "1.00", "0"] in cells(text)
    assert ["1.00-1.00", "1.00-1.00"] in cells(text)


def test_models_of_a_mixed_load_are_told_apart() -> None:
    mixed = Tally(latencies=[histogram(1, 1), histogram(5)], seconds=1.0)
    made = Level.of(mixed, SERVER, load=Load(concurrency=1), batch_size=1, models=["a", "b"])
    assert ["1", "in", "flight", "a", "2", "1.00", "1.00"] in cells(printed(report(made)))


@pytest.mark.parametrize(("provider", "title"), [("CUDAExecutionProvider", "on CUDAExecutionProvider"), (None, "on 127.0.0.1")])
def test_the_title_says_where(provider: str | None, title: str) -> None:
    assert title in report(level(), provider=provider).title


def test_doubts_of_all_rounds_are_told_once() -> None:
    doubted = level(8, server=SERVER + SERVER)
    (line,) = report(doubted, level(1, server=SERVER + SERVER), doubted).doubts()
    assert line.startswith("warning: at 8 in flight, 1 in flight: the server answered 8 requests")
    assert report(level(1), goal=Goal(percent=99, max_ms=1)).best is None


def test_slow_answers_take_no_more_room() -> None:
    text = printed(report(level(latencies_ms=[12345.678], errors={"RESOURCE_EXHAUSTED": 123456})))
    assert ["2", "0", "1", "12346", "12346", "12346", "4.00", "0.50", "1.50", "123456"] in cells(text)
