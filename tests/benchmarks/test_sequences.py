"""The program that compares many sequences with each one alone, on a small model with silero-vad's inputs and outputs."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from benchmarks import sequences
from tests.models import save_model


def wheel(folder: Path) -> Path:
    """A model of silero's interface: the new state is the mean of the state and the piece's first 128 samples."""
    number = TensorProto.FLOAT
    nodes = [
        helper.make_node("Slice", ["input", "zero", "width", "one"], ["piece"]),
        helper.make_node("Add", ["state", "piece"], ["moved"]),
        helper.make_node("Mul", ["moved", "half"], ["stateN"]),
        helper.make_node("ReduceMean", ["stateN", "axes"], ["mean"], keepdims=0),
        helper.make_node("Unsqueeze", ["mean", "one"], ["output"]),
    ]
    weights: dict[str, np.ndarray[Any, Any]] = {
        **{name: np.array([value], np.int64) for name, value in (("zero", 0), ("one", 1), ("width", 128))},
        "axes": np.array([0, 2], np.int64),
        "half": np.array([0.5], np.float32),
    }
    model = save_model(
        folder / "silero_vad.onnx",
        nodes,
        [("input", number, ["n", "m"]), ("state", number, [2, "n", 128]), ("sr", TensorProto.INT64, [])],
        [("output", number, ["n", 1]), ("stateN", number, [2, "n", 128])],
        weights,
    )
    with zipfile.ZipFile(folder / "silero_vad-1.0-py3-none-any.whl", "w") as archive:
        archive.write(model, "silero_vad/data/silero_vad.onnx")
    return folder


@pytest.mark.long
def test_many_sequences_get_what_each_gets_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sequences.main(wheel(tmp_path), sequences=50, steps=5, batches="1,16", as_json=True)
    alone, together = json.loads(capsys.readouterr().out)
    assert (alone["answers"], together["answers"]) == (250, 250)
    assert alone["rows"] == 1 < together["rows"]


@pytest.mark.long
def test_a_wrong_answer_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sequences.alone
    monkeypatch.setattr(sequences, "alone", lambda content, audio: expected(content, audio) + np.float32(0.001))
    with pytest.raises(SystemExit) as ended:
        sequences.main(wheel(tmp_path), sequences=3, steps=2, batches="4", as_json=False)
    assert ended.value.code == 1
    assert "0 of 6 equal bit for bit, largest difference 1.0e-03" in capsys.readouterr().out


def test_streams_of_audio_overlap_by_their_context() -> None:
    audio = sequences.pieces_of_audio(2, 3, seed=1)
    assert audio.shape == (2, 3, 576)
    assert (audio[:, 1, :64] == audio[:, 0, -64:]).all()
    assert not (audio[0] == audio[1]).all()


def test_a_folder_without_the_wheel_ends_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no wheels"):
        sequences.main(tmp_path)
