"""`halfserve tune`, through the command's own entry, with real servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from halfserve import Client
from halfserve.cli import main
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.tuning.recorded_points import RecordedPoints
from halfserve.serve.tuning.search import TuningPoint
from halfserve.serve.tuning.settings import Choice
from halfserve.serve.tuning.tuned_server import TunedServer
from tests.captured import captured, write_capture
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.model_control.controlled import controlled_server
from tests.serve.padded_models import save_masked_mean
from tests.serve.running_server import RunningServer

CONFIG = "# of the team\nmax_batch_size: 4  # rows\nparameters { key: 'foo' value { string_value: 'bar' } }\n"
QUICK = ("--seconds", "0.5", "--cores", "1")
WAIT_S = 60.0
UNREACHABLE, EASY = ("--max-latency-ms", "0.001"), ("--max-latency-ms", "10000")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    save_add(tmp_path / "models" / "one", 1)
    (tmp_path / "models" / "one" / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "models"


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Three captured requests of two rows."""
    requests = [captured({"x": np.full((2, 4), number, np.float32)}, model="one") for number in range(3)]
    return write_capture(tmp_path / "traffic", *requests, model="one")


@pytest.fixture
def explicit(repository: Path) -> Iterator[RunningServer]:
    with controlled_server(repository, ControlMode.EXPLICIT, load_at_start=("one",)) as server:
        yield server


def tune(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as finished:
        main(["tune", *map(str, arguments)])
    return int(finished.value.code or 0)


def config_of(server: RunningServer) -> ModelConfig:
    with Client(server.address) as client:
        config: ModelConfig = client.model_config("one")
    return config


@pytest.mark.long
def test_writes_what_was_measured_best_and_keeps_the_earlier_file(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = repository / "one" / "config.pbtxt", tmp_path / "tuning.html"
    assert tune(path.parent, *EASY, *QUICK, "--apply", "--json", "--report", page) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["best"]["latency_ms"] <= 10_000
    assert found["best"]["choice"][0]["max_batch_size"] >= 1
    assert all(point["mean_batch_size"] and point["compute_ms"] for point in found["points"])
    assert "Pareto front" in page.read_text()
    written = text_format.Parse(path.read_text(), ModelConfig())
    assert (written.max_batch_size, written.parameters["foo"].string_value) == (
        found["best"]["choice"][0]["max_batch_size"],
        "bar",
    )
    assert path.read_text().startswith("# of the team\n")
    backup = path.with_name("config.pbtxt.bak")
    assert (backup.read_text() if found["changes"] else path.read_text()) == CONFIG


@pytest.mark.long
def test_the_steps_of_an_ensemble_are_tuned_through_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_add(repository / "ten", 10)
    save_ensemble(repository / "pipe", CHAIN, max_batch_size=4)
    assert tune(repository / "pipe", *EASY, *QUICK, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == ["one", "ten"]
    assert len(found["best"]["choice"]) == 2
    # A step whose batches were smaller than the ensemble's would break the ensemble.
    assert all(settings["max_batch_size"] >= 4 for settings in found["best"]["choice"])
    assert (repository / "one" / "config.pbtxt").read_text() == CONFIG


def test_a_limit_that_nothing_keeps_shows_the_nearest_and_writes_nothing(
    explicit: RunningServer, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = config_of(explicit)
    report = tmp_path / "a.json"
    assert tune(repository / "one", "--address", explicit.address, *UNREACHABLE, *QUICK, "--apply", "--report", report) == 1
    assert "no settings keep p99 within 0.001 ms; the nearest reach" in capsys.readouterr().err
    assert json.loads(report.read_text())["best"] is None
    assert [one.name for one in (repository / "one").iterdir() if one.is_file()] == ["config.pbtxt"]
    assert (repository / "one" / "config.pbtxt").read_text() == CONFIG
    assert config_of(explicit) == before


def test_an_interrupted_tuning_restores_the_server_and_goes_on(
    explicit: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = config_of(explicit)
    command = ("one", "--address", explicit.address, *EASY, *QUICK, "--json")
    measure = TunedServer.measure
    made: list[Choice] = []

    def interrupted(self: TunedServer, choice: Choice, concurrency: int, seconds: float) -> TuningPoint:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(choice)
        return measure(self, choice, concurrency, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(TunedServer, "measure", interrupted)
        assert tune(*command) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    assert config_of(explicit) == before

    def counted(self: TunedServer, choice: Choice, concurrency: int, seconds: float) -> TuningPoint:
        made.append(choice)
        return measure(self, choice, concurrency, seconds)

    monkeypatch.setattr(TunedServer, "measure", counted)
    assert tune(*command) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(made) == len(first["points"]) + len(first["refused"])
    assert tune(*command) == 0  # everything is known
    again = json.loads(capsys.readouterr().out)
    assert len(made) == len(again["points"]) + len(again["refused"])
    assert (first["best"], first["points"]) == (again["best"], again["points"])
    assert config_of(explicit) == before


def test_an_interrupt_during_a_load_restores_the_server(explicit: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_of(explicit)
    load_model = Client.load_model
    loads: list[str] = []

    def interrupted(self: Client, name: str, **options: Any) -> None:
        load_model(self, name, **options)
        loads.append(name)
        if len(loads) == 1:
            assert config_of(explicit) != before
            raise KeyboardInterrupt

    monkeypatch.setattr(Client, "load_model", interrupted)
    assert tune("one", "--address", explicit.address, *EASY, *QUICK) == 130
    assert loads == ["one", "one"]
    assert config_of(explicit) == before


def test_a_damaged_record_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(b"{")
    assert RecordedPoints(path, _point).measure((), 1, 1.0, 0).requests_per_second == 7
    assert next(iter(json.loads(path.read_bytes()).values()))["requests_per_second"] == 7


def test_a_record_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert RecordedPoints(tmp_path / "file" / "record.json", _point).measure((), 1, 1.0, 0).requests_per_second == 7
    assert "cannot be kept for a later run" in caplog.text


def _point(choice: Choice, concurrency: int, seconds: float) -> TuningPoint:
    return TuningPoint(choice=choice, concurrency=concurrency, requests_per_second=7.0, latency_ms=1.0)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("{models}/none",), 2, "not found; expected a model's folder in a repository, REPOSITORY/MODEL, or a model file"),
        (("none", "--address", "127.0.0.1"), 2, "the address must be HOST:PORT"),
        (("{models}/one", "--data", "{traffic}", "--rows", "2"), 2, "captured requests go as they are; leave --rows out"),
        (("{models}/one", "--report", "none/report.json"), 1, "--report none/report.json: there is no folder"),
        (("{models}/one/1/model.onnx", "--apply"), 2, "--apply writes config.pbtxt of a model in a repository"),
    ],
)
def test_bad_options_are_one_line_before_any_server_starts(
    arguments: tuple[str, ...], code: int, text: str, repository: Path, traffic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*(argument.format(models=repository, traffic=traffic) for argument in arguments), *EASY) == code
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_config_that_cannot_be_written_is_found_before_measuring(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert tune(repository / "one", *EASY, "--apply") == 1
    assert "is not writeable" in capsys.readouterr().err


def test_a_model_that_cannot_be_served_is_the_servers_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "one" / "config.pbtxt").write_text("max_batch_sise: 4")
    assert tune(repository / "one", *EASY, *QUICK) == 1
    error = capsys.readouterr().err
    assert "the server to measure did not start" in error
    assert "max_batch_sise" in error


def test_free_sizes_are_chosen_as_in_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_masked_mean(tmp_path / "texts" / "mean")
    with controlled_server(tmp_path / "texts", ControlMode.EXPLICIT, load_at_start=("mean",)) as server:
        assert tune("mean", "--address", server.address, *EASY, *QUICK) == 0
        assert "the model takes any size, and bench took: --shape tokens:128 --shape mask:128" in capsys.readouterr().err


def test_captured_requests_are_measured_as_they_are(
    explicit: RunningServer, traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("one", "--address", explicit.address, "--data", traffic, *EASY, *QUICK, "--json") == 0
    found = capsys.readouterr()
    assert "the samples are 3 captured requests of one version 1, " in found.err
    assert min(point["choice"][0]["max_batch_size"] for point in json.loads(found.out)["points"]) >= 2


def listens(host: str, port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex((host, port)) == 0


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="no other system ends a process with its parent")
def test_a_killed_tuning_leaves_no_server(repository: Path) -> None:
    script = (
        "import pathlib, sys, time\n"
        "from halfserve.serve.tuning.tuned_server import own_server\n"
        "with own_server(pathlib.Path(sys.argv[1]), 'one', []) as address:\n"
        "    print(address, flush=True)\n"
        "    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, repository], stdout=subprocess.PIPE, text=True) as tuning:
        assert tuning.stdout is not None
        host, port = tuning.stdout.readline().split(":")
        tuning.kill()
    end_s = time.monotonic() + WAIT_S
    while listens(host, int(port)):
        assert time.monotonic() < end_s


def test_a_server_that_loads_nothing_by_request_says_so(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with controlled_server(repository, ControlMode.NONE) as server:
        assert tune("one", "--address", server.address, *EASY, *QUICK) == 1
        assert "--model-control explicit" in capsys.readouterr().err
