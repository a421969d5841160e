"""Every program in benchmarks/ says what it measures and how it is called; those without a file of their own run on little."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import save

import benchmarks
from benchmarks import (
    bare_session,
    checkpoints,
    convert,
    neighbours,
    object_storage,
    on_demand,
    processes,
    real_models,
    staged_batches,
)
from benchmarks.converters.packaged_networks import speech_detector
from benchmarks.converters.speed_models import convolutions
from benchmarks.harness.server_process import server_process
from tests.benchmarks.test_converters import pictures
from tests.models import save_mlp

pytestmark = pytest.mark.long

FOLDER = Path(next(iter(benchmarks.__path__)))
ELSEWHERE = {"litserve", "triton_python_backend_utils"}  # packages of other programs' environments
PROGRAMS = {
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(".__main__"): path
    for path in sorted(FOLDER.rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text()
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_loads_and_shows_its_command(name: str) -> None:
    is_package = PROGRAMS[name].name == "__main__.py"
    try:
        program = importlib.import_module(f"{name}.__main__" if is_package else name)
    except ModuleNotFoundError as error:
        if error.name not in ELSEWHERE | {"openvino", "ray"}:
            raise
        pytest.skip(f"needs the package {error.name}")
    assert program.__doc__ is not None
    assert f"python -m {name}" in program.__doc__ or "environment" in program.__doc__, "the command, or who starts it"


PEER = "onnxconverter-common"


def test_clean_conversions_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    convert.main(kinds="simple", converters=f"{PEER},modelopt autocast", rounds=0, workers=1, as_json=True)
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "modelopt is left out" in err
    assert [(row["converter"], row["keep_io"]) for row in result["clean"]] == [(PEER, True), (PEER, False)]
    assert all(row["cases"] == 14 and row["clean"] + sum(row["failed_steps"].values()) == 14 for row in result["clean"])
    assert result["versions"]["onnxconverter-common"]
    assert result["speed"] == []


def test_conversions_are_timed_and_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "SPEED_MODELS", {"small": convolutions})
    convert.main(kinds="", converters=f"{PEER},ours", rounds=1, workers=1)
    out, _ = capsys.readouterr()
    assert "Speed, medians" in out
    assert "0.50" in out


def test_models_on_demand_are_asked_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    on_demand.main(seconds=2, window_s=1, count=4, fitting=2, clients=4, rate=100)
    out, _ = capsys.readouterr()
    answered = {row[0].strip(): int(row[1]) for line in out.splitlines() if len(row := line.split("│")[1:]) > 2}
    assert answered["on demand: all"] == answered["of loaded models"] + answered["that waited for a load"]
    assert min(answered.values()) > 0
    assert "peak of loaded models 2.0 MiB of 3 MiB" in out


def wheel(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "seen-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("seen/pictures.onnx", pictures())
    return folder


def test_packaged_models_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real_models.main(wheel(tmp_path), converters=f"{PEER},ours,modelopt autocast", workers=1, as_json=True)
    out, err = capsys.readouterr()
    models = json.loads(out)["models"]
    assert "modelopt autocast is left out" in err
    assert models.keys() == {PEER, "ours"}
    assert all(rows["seen/pictures.onnx"]["problem"] == "" for rows in models.values())


def test_packaged_models_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real_models.main(wheel(tmp_path), converters="ours", workers=1)
    assert "ours: 1 of 1 right, 1 clean" in capsys.readouterr().out


def test_a_folder_without_wheels_ends_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no wheels"):
        real_models.main(tmp_path)


@pytest.mark.timeout(1200)
def test_weights_in_a_package_are_exported_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "silero_vad-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("silero_vad/data/silero_vad_16k.safetensors", save(speech_detector().state_dict()))
    checkpoints.main(tmp_path, converters=f"{checkpoints.OURS},{PEER},modelopt autocast", as_json=True)
    out, err = capsys.readouterr()
    assert "modelopt autocast is left out" in err
    rows = json.loads(out)["checkpoints"]["silero-vad 16 kHz"]
    assert rows.keys() == {checkpoints.OURS, PEER}
    ours = rows[checkpoints.OURS]
    assert ours["problem"] == ""
    assert ours["clean"]
    assert ours["trials"] == len(checkpoints.BATCHES)
    assert ours["size_ratio"] < 0.55


def test_a_poll_of_an_unchanged_repository_is_one_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")  # restored afterwards
    object_storage.main(mib=1, models=3, rounds=2)
    out = capsys.readouterr().out
    assert re.findall(
        r"^copy 1 MiB|^copy 3 small models: \d+ requests|^poll of 3 unchanged models: 1 request", out, re.MULTILINE
    ) == [
        "copy 1 MiB",
        "copy 3 small models: 11 requests",
        "poll of 3 unchanged models: 1 request",
    ]


def test_processes_are_compared_by_what_they_spend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes.main(save_mlp(tmp_path / "m.onnx"), counts="1,2", starts=1, rounds=2, seconds=0.3, as_json=True)
    medians = json.loads(capsys.readouterr().out)["medians"]
    assert medians.keys() == {"1", "2"}
    assert all(row["request_us"] > 0 and row["per_second"] > 0 and row["memory_mib"] > 50 for row in medians.values())
    assert medians["1"]["busiest_share"] > medians["2"]["busiest_share"] >= 0.45


def test_the_step_is_measured_beside_a_backend_that_does_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.python_step", "--elements", "4", "--count", "20", "--rounds", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert re.search(r"16 bytes, median: nothing \d+ us, process \d+ us; a step costs -?\d+ us more", shown)


def test_staged_batches_are_measured_without_and_with_clients(capsys: pytest.CaptureFixture[str]) -> None:
    staged_batches.main(row_bytes=2**18, rows=8, compute_ms=2, in_flight=32, seconds=0.5, rounds=1, processes=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12].strip() for line in lines] == ["bare loop", "engine alone", "over gRPC"]
    assert all(float(line[12:].split()[0]) > 0 for line in lines)


def test_shares_of_a_bare_session_are_those_of_every_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_mlp(tmp_path / "m.onnx")
    with server_process(model) as peer:
        names = [f"peer={peer.address}/m"]
        bare_session.main(model, names, concurrency="1,3", rounds=1, seconds=0.2, sizes="1,2,4")
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.count("│") == 5]
    named = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in named] == ["1", "", "", "3", "", ""]
    assert [row[1] for row in named][1:3] == ["halfserve", "peer"]
    assert named[0][1] == "bare session, batches of 1"
    assert named[3][1] in {"bare session, batches of 1", "bare session, batches of 2"}
    assert all(float(row[2]) > 0 and float(row[3]) > 0 for row in named)


def test_a_small_model_is_measured_beside_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server_process(save_mlp(tmp_path / "mlp.onnx")) as peer:
        http_port = peer.http_address.rpartition(":")[2]
        neighbours.main([f"peer={peer.address}:{http_port}"], rate=50, rounds=1, seconds=0.5, only="uploads")
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.count("│") == 7]
    named = [[cell.strip() for cell in row] for row in rows]
    assert [row[:2] for row in named] == [
        ["quiet", "halfserve"],
        ["quiet", "peer"],
        ["REST uploads of 4 MB", "halfserve"],  # the peer lacks the model
    ]
    assert all(0 < float(row[2]) <= float(row[3]) for row in named)
    assert re.fullmatch(r"4 at a time: [1-9]\d* with 200", named[2][5])
