from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from halfserve.amp_core.training.train import train
from halfserve.export.certificate.certificate import read_certificate
from halfserve.export.sources.source import factory_name
from tests.amp_core.several_inputs import HERE
from tests.amp_core.training.runs import settings
from tests.export.cli.commands import command, untrained

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a checkpoint of an untrained model of tests.export.models."""

    def saved(factory: str, data: str, *, policy: str = "native") -> Path:
        where = tmp_path / f"{factory}.pt"
        return untrained(where, f"tests.export.models:{factory}", f"tests.export.models:{data}", policy=policy)

    return saved


def test_a_checkpoint_becomes_a_certified_version(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "models"
    assert command("export", save("cnn", "images"), "--repository", repository, "--name", "digits", "--max-batch-size", 8) == 0
    out, _ = capfd.readouterr()
    assert "within budget" in out
    assert f"written   {repository / 'digits' / '1'}" in out
    certificate = read_certificate((repository / "digits" / "1" / "certificate.json").read_bytes())
    assert (certificate.model, certificate.samples, certificate.passed) == ("digits", 40, True)
    assert certificate.accuracy is not None
    assert certificate.reference_bytes is not None
    assert certificate.onnx_bytes < certificate.reference_bytes
    assert "max_batch_size: 8" in (repository / "digits" / "config.pbtxt").read_text()


@pytest.mark.long
def test_another_network_of_the_same_default_name_is_no_next_version(
    save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both are called "export", after the module that their factories are in."""
    repository, cnn = tmp_path / "models", save("cnn", "images")
    assert command("export", cnn, "--repository", repository) == command("export", cnn, "--repository", repository) == 0
    assert command("export", save("peaking", "rows"), "--repository", repository) == 1
    error = capfd.readouterr().err
    assert "holds another network made from tests.export.models:cnn" in error
    assert "--name" in error
    assert sorted(path.name for path in (repository / "export").iterdir()) == ["1", "2", "config.pbtxt"]
    assert command("export", save("peaking", "rows"), "--repository", repository, "--name", "peaking") == 0
    assert (repository / "peaking" / "1").is_dir()


@pytest.mark.long
def test_a_verdict_that_cannot_be_written_adds_no_version(
    save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "models"
    assert command("export", save("cnn", "images"), "--repository", repository, "--certificate", "/dev/full") == 1
    assert capfd.readouterr().err.strip().endswith("cannot write /dev/full: No space left on device")
    assert not repository.exists()


@pytest.mark.long
def test_json_is_one_object_and_nothing_else(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ("--repository", tmp_path / "models", "--json", "--keep-fp32", "1", "--version", 7, "--max-samples", 9)
    assert command("export", save("cnn", "images"), *arguments) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["path"], answer["version"]) == (str(tmp_path / "models" / "export" / "7"), 7)
    assert answer["certificate"]["samples"] == 9
    assert answer["certificate"]["conversion"]["fp32_modules"] == ["1"]


@pytest.mark.long
@pytest.mark.parametrize("factory", ["counting", "tagging", "few_classes"])
def test_whole_targets_that_are_no_classes_of_the_output_are_left_out(
    factory: str, save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--repository", tmp_path / "models", "--max-abs-error", 1, "--min-agreement", 0, "--json")
    assert command("export", save(factory, "counts"), *arguments) == 0
    certificate = json.loads(capfd.readouterr().out)["certificate"]
    assert certificate["accuracy"] is None
    assert certificate["notes"][0].startswith("the held-out targets are no classes of output 'output")


@pytest.mark.long
def test_over_budget_writes_nothing_and_exits_with_3(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    repository = tmp_path / "models"
    assert command("export", save("peaking", "rows"), "--repository", repository, "--no-search", "--json") == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert "halfserve export: output 'output' (rounded): " in err
    assert "are NaN or infinite (limit 0)" in err
    assert not repository.exists()


def test_the_certificate_and_the_twin_are_written_where_asked_for(save: Save, tmp_path: Path) -> None:
    where = tmp_path / "verdict.json"
    arguments = ("--repository", tmp_path / "models", "--fp32-twin", "--certificate", where, "--html")
    assert command("export", save("cnn", "images"), *arguments) == 0
    assert read_certificate(where.read_bytes()).passed
    assert "<html" in where.with_suffix(".html").read_text()
    assert (tmp_path / "models" / "export" / "1" / "fp32" / "model.onnx").exists()


def test_a_certificate_does_not_replace_the_checkpoint(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = save("cnn", "images")
    before = checkpoint.read_bytes()
    assert command("export", checkpoint, "--repository", tmp_path / "models", "--certificate", checkpoint) == 1
    assert "that is another file of this command; give it a name of its own" in capfd.readouterr().err
    assert checkpoint.read_bytes() == before


@pytest.mark.long
def test_what_training_pinned_stays_pinned(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = save("cnn", "images", policy="cuda+fp32:batch_norm")
    assert command("export", checkpoint, "--repository", tmp_path / "models", "--json") == 0
    assert json.loads(capfd.readouterr().out)["certificate"]["conversion"]["fp32_modules"] == ["1"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--min-agreement", 2), 2, "min_agreement is 2.0; expected a share from 0 to 1"),
        (("--name", "../x"), 1, "'../x' is no model name"),
        (("--name", ""), 1, "'' is no model name"),
        (("--keep-fp32", "zz"), 1, "keep_fp32 'zz' matches no parameter"),
        (("--samples", "s.npz"), 2, "--samples does not belong to a checkpoint"),
    ],
)
def test_wrong_options_are_one_line(
    arguments: tuple[object, ...], code: int, message: str, save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("export", save("cnn", "images"), "--repository", tmp_path / "models", *arguments) == code
    assert f"halfserve export: {message}" in capfd.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_checkpoint_that_is_missing_or_broken_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.pt").write_bytes(b"not a checkpoint")
    assert command("export", tmp_path / "missing.pt", "--repository", tmp_path) == 1
    assert "halfserve export: there is no file or folder" in capfd.readouterr().err
    assert command("export", tmp_path / "broken.pt", "--repository", tmp_path) == 1
    assert (
        "is no file of a known kind; expected MODULE:FACTORY, timm:NAME, torchvision:NAME, a Hugging Face folder, a checkpoint"
        in capfd.readouterr().err
    )


def test_a_factory_that_is_gone_is_one_line(save: Save, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("export", save("cnn", "no_such_data"), "--repository", tmp_path / "models") == 1
    assert "halfserve export: 'tests.export.models:no_such_data': the module" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("halfserve.examples.digits.model:model", "digits"),
        ("resnet:build", "resnet"),
        ("model:tagger", "tagger"),
        ("shop.models.ranking_v2:make", "ranking_v2"),
        ("pkg._private:make", "pkg"),
    ],
)
def test_a_models_name_is_the_telling_part_of_its_factory(factory: str, name: str) -> None:
    assert factory_name(factory) == name


def trained(folder: Path, model: str, data: str) -> Path:
    return train(settings(folder, model=f"{HERE}:{model}", data=f"{HERE}:{data}", epochs=1)).checkpoint


def inputs_of(repository: Path) -> list[tuple[str, list[object]]]:
    graph = onnx.load(next(repository.glob("*/1/model.onnx"))).graph
    return [(value.name, [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]) for value in graph.input]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "data", "names"),
    [
        ("reader", "by_name", ["words", "lengths"]),
        ("reader", "in_order", ["words", "lengths"]),
        ("together", "by_name", ["batch.words", "batch.lengths"]),
        ("reader", "padding", ["words", "lengths"]),
    ],
)
def test_several_inputs_are_checked_and_exported_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, data: str, names: list[str]
) -> None:
    checkpoint = trained(tmp_path / "run_command", model, data)
    assert command("check", checkpoint) == 0
    capfd.readouterr()
    assert command("export", checkpoint, "--repository", tmp_path / "models", "--json") == 0
    certificate = json.loads(capfd.readouterr().out)["certificate"]
    assert (certificate["passed"], certificate["samples"]) == (True, 20)
    assert certificate["accuracy"]["reference"] == pytest.approx(certificate["accuracy"]["rounded"], abs=0.06)
    assert inputs_of(tmp_path / "models") == [(names[0], ["batch", 6]), (names[1], ["batch"])]


def test_a_check_takes_several_inputs_from_the_data(capfd: pytest.CaptureFixture[str]) -> None:
    assert command("check", f"{HERE}:reader", "--data", f"{HERE}:by_name", "--json") == 0
    assert json.loads(capfd.readouterr().out)["model"] == "Reader"


def test_other_sizes_than_the_batch_may_vary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = trained(tmp_path / "run_command", "together", "by_name")
    options = ("--repository", tmp_path / "models", "--dynamic", "batch.words.1=length")
    assert command("export", checkpoint, *options) == 0
    assert inputs_of(tmp_path / "models") == [("batch.words", ["batch", "length"]), ("batch.lengths", ["batch"])]
    assert "within budget" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [
        ("words.1=0*n", 2, "--dynamic 'words.1=0*n': expected INPUT.AXIS=NAME"),
        ("words", 2, "--dynamic 'words': expected INPUT.AXIS=NAME, such as tokens.1=length"),
        ("words.1=2x", 2, "--dynamic 'words.1=2x': expected INPUT.AXIS=NAME"),
        ("words.1=batch", 2, "'batch' is the name of axis 0; give this size another name"),
        ("words.0=rows", 2, "axis 0 is the batch, which always varies; expected axis 1 or more"),
        ("word.1=length", 1, "there is no input 'word' whose size could vary; the model takes words, lengths"),
        ("lengths.1=length", 1, "input 'lengths' has no axis 1; with the batch it has 1, counted from 0"),
    ],
)
def test_a_size_that_cannot_vary_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str, code: int, message: str
) -> None:
    checkpoint = trained(tmp_path / "run_command", "reader", "by_name")
    capfd.readouterr()
    assert command("export", checkpoint, "--repository", tmp_path / "models", "--dynamic", option) == code
    assert message in capfd.readouterr().err
    assert not (tmp_path / "models").exists()


@pytest.mark.long
def test_what_torchs_evaluation_mode_leaves_out_is_told_and_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained(tmp_path / "run_command", "padded", "by_name")
    capfd.readouterr()
    assert command("export", checkpoint, "--repository", tmp_path / "models", "--json") == 0
    certificate = json.loads(capfd.readouterr().out)["certificate"]
    assert certificate["passed"]
    assert any("src_key_padding_mask" in note for note in certificate["notes"])
