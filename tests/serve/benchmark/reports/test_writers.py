"""What is written of a measurement: each file whole, each readable by whom it is for."""

from __future__ import annotations

import csv
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib.image
import pytest

from serve.benchmark.accuracy import Difference
from serve.benchmark.errors import BenchmarkArgumentError
from serve.benchmark.loads import Load
from serve.benchmark.reports.csv_file import write_csv
from serve.benchmark.reports.page import page
from serve.benchmark.reports.percentile_file import hdr_histogram, percentile_text, write_percentiles
from serve.benchmark.reports.plot import write_plot
from serve.benchmark.reports.report import Differences, Report, write_json
from serve.benchmark.reports.writers import Files
from serve.benchmark.sweep import Goal
from tests.serve.benchmark.levels import comparison, histogram, level, report, tally


def compared() -> Report:
    difference = Difference(output="y", max_abs=0.5, scaled=0.01, mismatched=0, agreement=1.0)
    differences = [Differences(name="b<i>", outputs=[difference], not_compared=["z"])]
    return report(level(1), comparison=comparison("a", "b<i>"), differences=differences)


def test_the_json_says_what_was_measured_where_and_how(tmp_path: Path) -> None:
    write_json(tmp_path / "bench.json", report(level()))
    figures = json.loads((tmp_path / "bench.json").read_text(), parse_constant=pytest.fail)
    facts = ["model", "version", "address", "provider", "batch_size", "date", "command", "machine", "goal", "best"]
    assert list(figures) == [*facts, "levels", "comparison", "differences"]
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


def test_each_level_has_its_distribution(tmp_path: Path) -> None:
    write_percentiles(tmp_path / "one.hgrm", report(level(1)))
    write_percentiles(tmp_path / "all.hgrm", report(level(1), level(16)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all-1.hgrm", "all-16.hgrm", "one.hgrm"]


def test_no_distribution_takes_the_place_of_another(tmp_path: Path) -> None:
    rates = [100.0, 1234567.0, 100.0, 1234568.0, 0.5]
    write_percentiles(tmp_path / "a.hgrm", report(*(level(load=Load(rate=rate)) for rate in rates)))
    names = ["a-0.5.hgrm", "a-100-1.hgrm", "a-100-2.hgrm", "a-1234567.hgrm", "a-1234568.hgrm"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_picture_shows_the_levels(tmp_path: Path) -> None:
    write_plot(tmp_path / "a.png", report(level(1), level(16), level(4)))
    write_plot(tmp_path / "b.png", report(level(1), level(16), level(64)))
    first, second = (matplotlib.image.imread(tmp_path / name) for name in ("a.png", "b.png"))
    assert first.shape == second.shape == (1050, 1200, 4)
    assert 0.01 < (first[..., :3] < 0.9).any(axis=2).mean() < 0.5
    assert (first != second).any()


@pytest.mark.parametrize(
    "made",
    [
        report(level(load=Load(rate=5.0)), level(load=Load(rate=9.0), latencies_ms=[1.0])),
        report(level(1, server=None, windows=[tally([1, 2])] * 4), provider=None),
        compared(),
    ],
    ids=["sweep", "no statistics", "comparison"],
)
def test_the_page_stands_alone_and_is_well_formed(made: Report) -> None:
    text = page(made)
    assert "<script" not in text
    assert "b<i>" not in text
    tree = ET.fromstring(text.removeprefix("<!DOCTYPE html>\n").replace('<meta charset="utf-8">', ""))  # noqa: S314  (ours)
    figures = [element for element in tree.iter() if element.tag.endswith("}svg")]
    assert len(figures) == 3
    assert not [element for element in tree.iter() if element.get("src")]


def test_the_page_of_a_comparison_shows_ratios_and_differences() -> None:
    text = page(compared())
    assert "1.00\n1.00-1.00" in text
    assert "1.00e-02" in text
    assert "not in both" in text


def test_doubts_are_on_the_page() -> None:
    assert "ended early (gone &lt;away&gt;)" in page(report(level(ended_early="gone <away>")))


@pytest.mark.parametrize("option", ["output", "csv", "html", "hgrm", "plot"])
def test_what_cannot_be_written_is_found_before_and_leaves_nothing(tmp_path: Path, option: str) -> None:
    wrong = tmp_path / "nowhere" / "a.txt"
    with pytest.raises(FileNotFoundError, match=f"--{option} {wrong}: there is no folder"):
        Files(**{option: wrong}).writers()
    (write,) = Files(**{option: tmp_path / "a.txt"}).writers()
    write(report(level(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_each_output_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    with pytest.raises(BenchmarkArgumentError, match="--output and --csv .*link: are one file; expected a file for each"):
        Files(output=tmp_path / "a.json", csv=tmp_path / "link").writers()
    assert len(Files(output=Path("/dev/null"), csv=Path("/dev/null")).writers()) == 2
