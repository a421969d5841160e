"""Tables, files and plots of a report, and the progress bar."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from halfserve.serve.benchmark import BenchmarkArgumentError
from halfserve.serve.benchmark.bench_command import report_writers
from halfserve.serve.benchmark.benchmark_report import (
    BenchmarkReport,
    hdr_histogram,
    percentile_text,
    write_csv,
    write_json,
    write_percentiles,
)
from halfserve.serve.benchmark.comparison import Difference, Differences
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.benchmark.load.spec import LoadStatistics
from halfserve.serve.benchmark.measurement import Goal
from halfserve.serve.benchmark.page import page
from halfserve.serve.benchmark.tables import ProgressBar, tables
from tests.serve.benchmark.levels import SERVER, comparison, histogram, level, report, tally
from tests.whole_words import broken_words


def printed(made: BenchmarkReport, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables(made, narrow=True):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("levels", "row"),
    [
        ([level(2), level(16)], "2 2 4 2.00 4.00 4.00 0.50 1.50 0"),
        ([level(load=Load(rate=7.0), errors={"INTERNAL": 5}, goodput_ms=2.5)], "7 2 4 1 2.00 4.00 1.50 5"),
        (
            [level(latencies_ms=[12345.678], errors={"RESOURCE_EXHAUSTED": 123456})],
            "2 0 1 12346 12346 4.00 0.50 1.50 123456",
        ),
    ],
    ids=["sweep", "rate, goodput and errors", "slow"],
)
def test_levels_have_a_row_each_that_fits_a_terminal(levels: list[Level], row: str) -> None:
    text = printed(report(*levels))
    assert "…" not in text
    assert row.split() in cells(text)
    assert "requests/s" in text.splitlines()[1], "the head is one row"
    assert ("asked" in text) == (levels[0].load.rate is not None)


def test_a_comparison_fits_a_terminal() -> None:
    text = printed(report(level(1), comparison=comparison("digits", "digits_fp32")))
    assert "…" not in text
    assert ["1", "digits", "2", "2.00", "4.00", "0"] in cells(text)
    assert ["1", "digits_fp32", "2", "2.00", "4.00", "1.00", "1.00", "0"] in cells(text)
    assert ["1.00-1.00", "1.00-1.00"] in cells(text)


def test_a_comparison_of_long_names_keeps_them_whole() -> None:
    long = "digits_fp32@models.example.org:8001/minilm-reranker-v2"
    difference = Difference(output="last_hidden_state", max_abs=0.5, scaled=0.01, mismatched=123456, rows=1)
    differences = [Differences(name=long, outputs=[difference], not_compared=["pooler_output"])]
    made = report(level(1), comparison=comparison("digits", long), differences=differences)
    assert [broken_words(table) for table in tables(made, narrow=True)] == [[], []]
    assert printed(made).count(long) == 2


def test_models_of_a_mixed_load_have_rows() -> None:
    mixed = LoadStatistics(latencies=[histogram(1, 1), histogram(5)], seconds=1.0)
    made = Level(tally=mixed, server=SERVER, load=Load(concurrency=1), batch_size=1, models=["a", "b"])
    assert ["1", "in", "flight", "a", "2", "1.00", "1.00"] in cells(printed(report(made)))


@pytest.mark.parametrize(("provider", "title"), [("CUDAExecutionProvider", "on CUDAExecutionProvider"), (None, "on 127.0.0.1")])
def test_the_title_says_where(provider: str | None, title: str) -> None:
    assert title in report(level(), provider=provider).title


def test_doubts_of_all_rounds_appear_once() -> None:
    doubted = level(8, server=SERVER + SERVER)
    (line,) = report(doubted, level(1, server=SERVER + SERVER), doubted).doubts()
    assert line.startswith("warning: at 8 in flight, 1 in flight: the server answered 8 requests")
    assert report(level(1), goal=Goal(percent=99, max_ms=1)).best is None


def compared() -> BenchmarkReport:
    difference = Difference(output="y", max_abs=0.5, scaled=0.01, mismatched=0, rows=1)
    differences = [Differences(name="b<i>", outputs=[difference], not_compared=["z"])]
    return report(level(1), comparison=comparison("a", "b<i>"), differences=differences)


def test_the_json_says_what_was_measured_where_and_how(tmp_path: Path) -> None:
    write_json(tmp_path / "bench.json", report(level()))
    figures = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    facts = ["model", "version", "address", "provider", "batch_size", "date", "command", "notes", "machine"]
    assert list(figures) == [*facts, "goal", "best", "levels", "comparison", "differences"]
    assert (figures["model"], figures["version"], figures["batch_size"]) == ("mlp", "3", 2)
    assert abs(datetime.fromisoformat(figures["date"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert figures["machine"].keys() == {"platform", "cpus", "python"}
    assert [one["concurrency"] for one in figures["levels"]] == [2]


def test_the_json_of_a_search_and_of_a_comparison() -> None:
    found = report(level(1), level(8, latencies_ms=[99]), goal=Goal(percent=99, max_ms=5)).to_json()
    assert (found["goal"], found["best"]) == ({"percent": 99, "max_ms": 5}, 0)
    figures = compared().to_json()
    assert [one["name"] for one in figures["comparison"]] == ["a", "b<i>"]
    assert figures["differences"][0]["outputs"][0]["scaled"] == 0.01
    json.dumps(figures, allow_nan=False)


def test_the_csv_has_a_line_per_level(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", report(level(1), level(load=Load(rate=50.0), server=None)))
    with (tmp_path / "a.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["concurrency"], first["rate"], first["requests"], first["server_queue_ms"]) == ("1", "", "4", "0.5")
    assert (second["concurrency"], second["rate"], second["server_queue_ms"]) == ("", "50.0", "")
    assert float(first["p99.9_ms"]) == pytest.approx(4, rel=1e-3)


def test_the_csv_of_a_comparison_has_a_line_per_round(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", compared())
    with (tmp_path / "a.csv").open(newline="") as file:
        assert [(line["name"], line["round"]) for line in csv.DictReader(file)] == [
            ("a", "1"),
            ("a", "2"),
            ("b<i>", "1"),
            ("b<i>", "2"),
        ]


def test_the_distribution_is_hdrhistograms_text(tmp_path: Path) -> None:
    lines = percentile_text(histogram(*range(1, 101))).decode().splitlines()
    assert lines[0].split() == ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]
    value, percentile, count, inverse = lines[2].split()
    assert float(value) == pytest.approx(1, rel=1e-3)
    assert (percentile, count, inverse) == ("0.000000000000", "1", "1.00")
    whole = next(line.split() for line in lines if "1.000000000000" in line)
    assert float(whole[0]) == pytest.approx(100, rel=1e-3)
    assert whole[1:] == ["1.000000000000", "100"]
    mean, deviation = map(float, re.findall(r"= +([\d.]+)", lines[-3]))
    assert mean == pytest.approx(50.5, rel=1e-3)
    assert deviation == pytest.approx(28.87, rel=1e-3)
    assert hdr_histogram(histogram(*range(1, 101))).get_total_count() == 100


def test_distributions_have_distinct_files(tmp_path: Path) -> None:
    rates = [100.0, 1234567.0, 100.0, 1234568.0, 0.5]
    write_percentiles(tmp_path / "a.hgrm", report(*(level(load=Load(rate=rate)) for rate in rates)))
    write_percentiles(tmp_path / "one.hgrm", report(level(16)))
    names = ["a-0.5.hgrm", "a-100-1.hgrm", "a-100-2.hgrm", "a-1234567.hgrm", "a-1234568.hgrm", "one.hgrm"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("made", "charts"),
    [
        (report(level(load=Load(rate=5.0)), level(load=Load(rate=9.0), latencies_ms=[1.0])), 5),
        (report(level(1, server=None, windows=[tally([1, 2])] * 4), provider=None), 5),
        (compared(), 5),
    ],
    ids=["sweep", "no statistics", "comparison"],
)
def test_the_page_stands_alone_and_is_well_formed(made: BenchmarkReport, charts: int) -> None:
    text = page(made)
    assert "<script" not in text
    assert "b<i>" not in text
    tree = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))  # noqa: S314  (ours)
    assert len([element for element in tree.iter() if element.tag.endswith("}figure")]) == charts
    assert not [element for element in tree.iter() if element.get("src")]


def test_the_page_of_a_comparison_shows_ratios_and_differences() -> None:
    text = page(compared())
    assert "1.00\n1.00-1.00" in text
    assert ">0.01</td>" in text
    assert "not in both" in text


def test_the_page_explains_the_short_names_of_a_comparison() -> None:
    long = "digits_fp32@models.example.org:8001/minilm-reranker-v2"
    assert f"target 2: {long}" in page(report(level(1), comparison=comparison("digits", long)))


def test_doubts_are_on_the_page() -> None:
    assert "ended early (gone &lt;away&gt;)" in page(report(level(ended_early="gone <away>")))


@pytest.mark.parametrize("option", ["output", "csv", "html", "hgrm"])
def test_unwritable_outputs_are_found_before_the_measurement(tmp_path: Path, option: str) -> None:
    wrong = tmp_path / "nowhere" / "a.txt"
    with pytest.raises(FileNotFoundError, match=f"--{option} {wrong}: there is no folder"):
        report_writers({f"--{option}": wrong})
    (write,) = report_writers({f"--{option}": tmp_path / "a.txt"})
    write(report(level(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_each_output_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    with pytest.raises(BenchmarkArgumentError, match="--output and --csv .*link: are one file; expected a file for each"):
        report_writers({"--output": tmp_path / "a.json", "--csv": tmp_path / "link"})
    assert len(report_writers({"--output": Path("/dev/null"), "--csv": Path("/dev/null")})) == 2


def test_a_models_name_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        bar.begin("measuring a[/b]", 1)
    assert "measuring a[/b]" in capsys.readouterr().err
