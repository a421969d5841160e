"""Models with several inputs, from training to the repository."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import halfserve
from amp_core.training.train import train
from tests.amp_core.several_inputs import HERE
from tests.amp_core.training.runs import settings


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exited:
        halfserve.main([str(argument) for argument in arguments])
    return exited.value.code if isinstance(exited.value.code, int) else 0


def trained(folder: Path, model: str, data: str) -> Path:
    return train(settings(folder, model=f"{HERE}:{model}", data=f"{HERE}:{data}", epochs=1)).checkpoint


def inputs_of(repository: Path) -> list[tuple[str, list[object]]]:
    graph = onnx.load(next(repository.glob("*/1/model.onnx"))).graph
    return [(value.name, [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]) for value in graph.input]


@pytest.mark.parametrize(
    ("model", "data", "names"),
    [
        ("reader", "by_name", ["words", "lengths"]),
        ("reader", "in_order", ["words", "lengths"]),
        ("together", "by_name", ["batch.words", "batch.lengths"]),
        ("reader", "padding", ["words", "lengths"]),
    ],
)
def test_they_are_checked_and_exported_under_their_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, data: str, names: list[str]
) -> None:
    checkpoint = trained(tmp_path / "run", model, data)
    assert run("check", checkpoint) == 0
    capfd.readouterr()
    assert run("export", checkpoint, "--repository", tmp_path / "models", "--json") == 0
    certificate = json.loads(capfd.readouterr().out)["certificate"]
    assert (certificate["passed"], certificate["samples"]) == (True, 20)
    assert certificate["accuracy"]["reference"] == pytest.approx(certificate["accuracy"]["rounded"], abs=0.06)
    assert inputs_of(tmp_path / "models") == [(names[0], ["batch", 6]), (names[1], ["batch"])]


def test_a_check_takes_them_from_the_data(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("check", f"{HERE}:reader", "--data", f"{HERE}:by_name", "--json") == 0
    assert json.loads(capfd.readouterr().out)["model"] == "Reader"


def test_other_sizes_than_the_batchs_may_vary_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = trained(tmp_path / "run", "together", "by_name")
    options = ("--repository", tmp_path / "models", "--dynamic", "batch.words.1=length")
    assert run("export", checkpoint, *options) == 0
    assert inputs_of(tmp_path / "models") == [("batch.words", ["batch", "length"]), ("batch.lengths", ["batch"])]
    assert "within budget" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [
        ("words.1=0*n", 2, "--dynamic 'words.1=0*n': expected INPUT.AXIS=NAME"),
        ("words", 2, "--dynamic 'words': expected INPUT.AXIS=NAME, such as tokens.1=length"),
        ("words.1=2x", 2, "--dynamic 'words.1=2x': expected INPUT.AXIS=NAME"),
        ("words.1=batch", 2, "'batch' is what axis 0 is called; give the size a name of its own"),
        ("words.0=rows", 2, "axis 0 is the batch, which may have any size as it is; expected 1 or more"),
        ("word.1=length", 1, "there is no input 'word' whose size could vary; the model takes words, lengths"),
        ("lengths.1=length", 1, "input 'lengths' has no axis 1; with the batch it has 1, counted from 0"),
    ],
)
def test_a_size_that_cannot_vary_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str, code: int, message: str
) -> None:
    checkpoint = trained(tmp_path / "run", "reader", "by_name")
    capfd.readouterr()
    assert run("export", checkpoint, "--repository", tmp_path / "models", "--dynamic", option) == code
    assert message in capfd.readouterr().err
    assert not (tmp_path / "models").exists()


def test_what_torchs_evaluation_mode_leaves_out_is_told_and_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained(tmp_path / "run", "padded", "by_name")
    capfd.readouterr()
    assert run("export", checkpoint, "--repository", tmp_path / "models", "--json") == 0
    certificate = json.loads(capfd.readouterr().out)["certificate"]
    assert certificate["passed"]
    assert any("src_key_padding_mask" in note for note in certificate["notes"])
