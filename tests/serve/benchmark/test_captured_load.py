"""`halfserve bench --data FOLDER`: captured requests as a load, their replay, and the comparison of their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve import Client
from halfserve.serve.benchmark import bench_command
from tests.captured import captured, write_capture
from tests.models import save_text
from tests.serve.benchmark.test_bench_command import bench, figures
from tests.serve.conftest import load_repository
from tests.serve.http.tasks.small_picture_models import encoded, save_picture_model
from tests.serve.running_server import RunningServer, running_server

GRAPH = "(float[batch, width] x) => (float[batch, width] y) {{ y = {body} }}"
ROW = np.array([[1.0, 3.0, 2.0]], np.float32)
MIXED = [ROW, np.array([[1, 2, 3, 4], [8, 9, 7, 6]], np.float32), ROW + 1, np.full((1, 2), 1e38, np.float32)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Version 1 of "scores" returns its input, version 2 ten times that, version 3 at most 5."""
    root = tmp_path_factory.mktemp("repository")
    save_text(root / "scores" / "1" / "model.onnx", GRAPH.format(body="Identity(x)"))
    save_text(root / "scores" / "2" / "model.onnx", GRAPH.format(body="Mul(x, ten)"), ten=np.float32(10))
    clipped = GRAPH.format(body="Min(x, five)")
    save_text(root / "scores" / "3" / "model.onnx", clipped, five=np.float32(5))
    (root / "scores" / "config.pbtxt").write_text("max_batch_size: 8 version_policy { all {} }")
    with running_server(lambda: load_repository(root)) as running:
        yield running


def mixed(folder: Path) -> Path:
    """Write requests of three shapes with arrivals in 0.3 s, one of another signature and one that was refused."""
    requests = [captured({"x": array}, 0.1 * number) for number, array in enumerate(MIXED)]
    requests[2] = captured({"x": MIXED[2]}, 0.2, parameters={"sequence_id": 7, "sequence_start": True, "priority": 1})
    wrong = captured({"x": np.ones((1, 3), np.int64)}, 0.15)
    return write_capture(folder, *requests, wrong, captured({"x": ROW}, 0.25, status="INVALID_ARGUMENT"), shard=4)


def answered(server: RunningServer, version: str) -> tuple[int, int]:
    """Requests and rows that a version has computed."""
    with Client(server.address) as client:
        (one,) = client.statistics("scores", version)
    return one.inference_stats.success.count, one.inference_count


def test_captured_requests_are_sent_as_they_were_in_turn(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = answered(server, "1")
    load = ("--version", "1", "--concurrency", "1", "--requests", "8", "--processes", "1")
    found = figures(server, capsys, "scores", "--data", str(mixed(tmp_path)), *load)
    after = answered(server, "1")
    assert (after[0] - before[0], after[1] - before[1]) == (1 + 8, 1 + 2 * 5)
    (level,) = found["levels"]
    assert (level["requests"], level["errors"], level["batch_size"]) == (8, 0, 1.25)
    assert "4 captured requests of scores version 1, " in found["notes"][0]


def test_a_replay_has_the_captured_arrivals_at_each_speed(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "bench.html"
    data = ("--data", str(mixed(tmp_path)), "--replay", "2,4", "--processes", "2", "--html", str(page))
    assert bench("scores", "--address", server.address, "--warmup", "0", *data, "--json") == 0
    printed = capsys.readouterr()
    levels: list[dict[str, Any]] = json.loads(printed.out)["levels"]
    assert [(one["speed"], one["requests"], one["errors"]) for one in levels] == [(2, 5, 0), (4, 5, 0)]
    assert [one["rate"] for one in levels] == pytest.approx([5 / 0.15, 5 / 0.075], rel=1e-3)
    for place in (printed.err, page.read_text()):
        assert "4 captured requests of scores version 1, " in place
        assert "left out: 1 that do not fit the model; 1 that the server refused" in place


def test_a_replay_ends_at_the_time_or_number_given(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("scores", "--data", str(mixed(tmp_path)), "--replay", "1")
    assert figures(server, capsys, *data, "--seconds", "0.12")["levels"][0]["requests"] == 2
    assert figures(server, capsys, *data, "--requests", "3")["levels"][0]["requests"] == 3


def test_the_answers_of_two_versions_are_compared(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--version", "1", "--rounds", "1", "--concurrency", "1", "--requests", "4")
    found = figures(
        server, capsys, "scores", "--data", str(mixed(tmp_path)), *load, "--against", "scores/2", "--against", "scores/3"
    )
    assert [one["name"] for one in found["comparison"]] == ["scores/1", "scores/2", "scores/3"]
    tenfold, clipped = found["differences"]
    assert (clipped["requests"], clipped["differing"], clipped["failed"]) == (4, 2, 0)
    (output,) = clipped["outputs"]
    assert (output["differing"], output["class_changes"], output["mismatched"]) == (2, 1, 0)
    assert (output["max_abs"], output["scaled"]) == (pytest.approx(1e38), pytest.approx(2e37))
    (output,) = tenfold["outputs"]
    assert (output["differing"], output["class_changes"], output["mismatched"]) == (4, 0, 2)


def test_captured_picture_files_are_sent_to_a_model_that_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_picture_model(tmp_path / "repository")
    files = np.array([encoded("PNG"), encoded("JPEG")], object)
    folder = write_capture(tmp_path / "captured", captured({"image": files}), captured({"image": files[:, None]}))
    with running_server(lambda: load_repository(tmp_path / "repository")) as running:
        found = figures(running, capsys, "net", "--data", str(folder), "--concurrency", "1", "--requests", "2")
    assert (found["levels"][0]["requests"], found["levels"][0]["batch_size"]) == (2, 2)


def test_a_folder_named_random_does_not_replace_random_inputs(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mixed(tmp_path / "random").parent)
    found = figures(server, capsys, "scores", "--shape", "x:3", "--concurrency", "1", "--requests", "2")
    assert (found["notes"], found["levels"][0]["requests"]) == ([], 2)


def test_what_exceeds_the_memory_is_left_out_of_the_contents_alone(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "MAX_BYTES", 4 * ROW.nbytes)
    folder = write_capture(tmp_path, *[captured({"x": ROW + number}, 0.001 * number) for number in range(40)])
    found = figures(server, capsys, "scores", "--data", str(folder), "--replay", "1")
    assert "3 captured requests of scores" in found["notes"][0]
    assert "37 beyond the limit" in found["notes"][0]
    assert found["levels"][0]["requests"] == 40


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--data", "wide"], 2, "input 'x' of model 'scores' has the shape [2], expected [-1, -1]"),
        (
            ["--data", "whole"],
            2,
            "no captured request fits the model: input 'x' of model 'scores' takes FP32, but",
        ),
        (["--data", "named"], 2, "they have the inputs z, and no 'x', which the model takes; nothing was sent"),
        (["--data", "empty"], 2, "has no captured requests"),
        (["--data", "damaged"], 2, "000001.npz: is not a whole shard of captured requests"),
        (["--data", "several"], 2, "has requests of 'a', 'b', expected those of one model; name its folder"),
        (["--data", "one", "--replay", "1"], 2, "one has no two requests at different times; leave --replay out"),
        (["--data", "one", "--replay", "-1"], 2, "--replay -1: expected numbers above 0"),
        (["--replay", "1"], 2, "--replay sends captured requests; expected their folder as --data FOLDER"),
        (["--data", "one", "--shape", "x:3"], 2, "captured requests of one model go as they are; leave --shape out"),
        (["--data", "one", "--replay", "1", "--rate", "1"], 2, "--rate and --replay are kinds of load; expected one of them"),
        (
            ["--data", "one", "--replay", "1", "--until-stable"],
            2,
            "--replay has its own load and length; leave --until-stable out",
        ),
    ],
)
def test_captures_that_cannot_be_sent_are_refused_in_one_line(
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_capture(Path("wide"), captured({"x": np.ones(2, np.float32)}))
    write_capture(Path("whole"), captured({"x": np.ones((1, 3), np.int64)}))
    write_capture(Path("named"), captured({"z": ROW}))
    write_capture(Path("one"), captured({"x": ROW}))
    write_capture(Path("several"), captured({"x": ROW}), model="a")
    write_capture(Path("several"), captured({"x": ROW}), model="b")
    Path("empty").mkdir()
    damaged = write_capture(Path("damaged"), captured({"x": ROW})) / "scores" / "000001.npz"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    before = answered(server, "3")
    assert bench("scores", *arguments, "--address", server.address) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("halfserve bench: ")
    assert text in printed.err
    assert printed.err.count("\n") == 1
    assert answered(server, "3") == before
