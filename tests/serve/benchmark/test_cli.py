"""`halfserve bench`, through the command's own entry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halfserve import main
from serve.benchmark import cli
from serve.benchmark.cli import parse_concurrencies
from serve.benchmark.errors import BenchmarkArgumentError, BenchmarkError
from serve.benchmark.level import Level
from tests.serve.benchmark.levels import level
from tests.serve.running_server import RunningServer


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as finished:
        main(["bench", *arguments])
    return int(finished.value.code or 0)


def test_measures_and_writes_the_report(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 64), np.float16))
    files = ("--output", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png"))
    load = ("--concurrency", "1,2", "--requests", "20", "--warmup", "0", "--batch-size", "4", "--input", f"x={tmp_path}/x.npy")
    assert bench("mlp", "--address", server.address, *load, *files, "--json") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert [(one["concurrency"], one["requests"], one["errors"]) for one in figures["levels"]] == [(1, 20, 0), (2, 20, 0)]
    assert (figures["model"], figures["version"], figures["provider"]) == ("mlp", "3", "CPUExecutionProvider")
    assert figures["levels"][0]["mean_batch_size"] == 4
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["levels"] == figures["levels"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "requests/s" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nope"], 1, "nope"),
        (["mlp", "--concurrency", "1,x"], 2, "--concurrency 1,x: expected numbers above 0"),
        (["mlp", "--batch-size", "17"], 2, "--batch-size 17: model 'mlp' takes 1 to 16 rows a request"),
        (["mlp", "--input", "x=[1]"], 1, "has the shape [1], expected [-1, 64]"),
        (["echo_types"], 2, "takes any size in [-1]; choose with --shape in_BOOL:N"),
        (["picky", "--input", "i=[[7]]"], 1, "halfserve bench: "),
        (["mlp", "--output", "/nowhere/bench.json"], 1, "--output /nowhere/bench.json: there is no folder /nowhere"),
        (["mlp", "--address", "127.0.0.1:1"], 1, "no server answers at 127.0.0.1:1 (connection refused)"),
    ],
)
def test_wrong_input_is_answered_in_one_line(
    server: RunningServer, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    address = [] if "--address" in arguments else ["--address", server.address]
    assert bench(*arguments, *address) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("halfserve bench: ")
    assert text in captured.err
    assert captured.err.count("\n") == 1


def test_failed_requests_stand_beside_the_answered_ones(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    # Row 0 is fine, and it is the one that is tried before the load; row 7 makes the model fail.
    load = ("--concurrency", "1", "--requests", "2", "--warmup", "0", "--input", "i=[[0],[7]]")
    assert bench("picky", "--address", server.address, *load, "--json") == 0
    (figures,) = json.loads(capsys.readouterr().out)["levels"]
    assert (figures["requests"], figures["errors"]) == (1, 1)
    assert sum(figures["errors_by_status"].values()) == 1


def test_the_levels_before_a_failure_are_kept(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_level_and_no_more(*_: object) -> Iterator[Level]:
        yield level(concurrency=1)
        raise BenchmarkError("at concurrency 2 no request succeeded (9 failed): UNAVAILABLE: stopping")

    monkeypatch.setattr(cli, "run_sweep", one_level_and_no_more)
    output = tmp_path / "bench.json"
    assert bench("mlp", "--address", server.address, "--output", str(output)) == 1
    assert [one["concurrency"] for one in json.loads(output.read_text())["levels"]] == [1]
    assert "halfserve bench: at concurrency 2 no request succeeded" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1.5"])
def test_what_is_no_list_of_concurrencies(text: str) -> None:
    with pytest.raises(BenchmarkArgumentError, match=f"--concurrency {text}: expected numbers above 0"):
        parse_concurrencies(text)
    assert parse_concurrencies("1, 4,16") == [1, 4, 16]
