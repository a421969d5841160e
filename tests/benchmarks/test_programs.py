"""The programs that compare converters, run on little."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import save

from benchmarks import checkpoints, convert, real_models
from benchmarks.converters.packaged_networks import speech_detector
from benchmarks.converters.speed_models import convolutions
from tests.benchmarks.test_converters import pictures

pytestmark = pytest.mark.long

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


def wheel(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "seen-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("seen/pictures.onnx", pictures())
    return folder


@pytest.mark.long
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
