from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from halfserve.amp_core.training.train import train
from halfserve.export.certificate.certificate import read_certificate
from halfserve.export.sources.source import factory_name
from tests.amp_core.several_inputs import HERE
from tests.amp_core.training.runs import settings
from tests.export.cli.commands import Outcome, Shell, untrained

MODELS = Path("models")
Export = Callable[..., Outcome]


@pytest.fixture
def export(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    """Exports a checkpoint, trained or by the name of its factory in tests.export.models, to the repository `models`."""
    monkeypatch.chdir(tmp_path)

    def exported(checkpoint: str | Path, *arguments: object, data: str = "images", policy: str = "native") -> Outcome:
        if isinstance(checkpoint, str):
            factory, where = f"tests.export.models:{checkpoint}", Path(f"{checkpoint}.pt")
            checkpoint = untrained(where, factory, f"tests.export.models:{data}", policy=policy)
        return shell("export", checkpoint, "--repository", MODELS, *arguments)

    return exported


def test_a_checkpoint_becomes_a_certified_version(export: Export) -> None:
    done = export("cnn", "--name", "digits", "--max-batch-size", 8)
    assert done.code == 0
    assert "within budget" in done.out
    assert "written   models/digits/1" in done.out
    certificate = read_certificate((MODELS / "digits" / "1" / "certificate.json").read_bytes())
    assert (certificate.model, certificate.samples, certificate.passed) == ("digits", 40, True)
    assert certificate.accuracy is not None
    assert certificate.reference_bytes is not None
    assert certificate.onnx_bytes < certificate.reference_bytes
    assert "max_batch_size: 8" in (MODELS / "digits" / "config.pbtxt").read_text()


@pytest.mark.long
def test_another_network_of_the_same_default_name_is_no_next_version(export: Export) -> None:
    """Both are called "export", after the module that their factories are in."""
    assert export("cnn").code == export("cnn").code == 0
    done = export("peaking", data="rows")
    assert done.code == 1
    assert "holds another network made from tests.export.models:cnn" in done.err
    assert "--name" in done.err
    assert sorted(path.name for path in (MODELS / "export").iterdir()) == ["1", "2", "config.pbtxt"]
    assert export("peaking", "--name", "peaking", data="rows").code == 0
    assert (MODELS / "peaking" / "1").is_dir()


@pytest.mark.long
def test_a_verdict_that_cannot_be_written_adds_no_version(export: Export) -> None:
    done = export("cnn", "--certificate", "/dev/full")
    assert (done.code, MODELS.exists()) == (1, False)
    assert done.err.strip().endswith("cannot write /dev/full: No space left on device")


@pytest.mark.long
def test_json_is_one_object_and_nothing_else(export: Export) -> None:
    answer = export("cnn", "--json", "--keep-fp32", "1", "--version", 7, "--max-samples", 9).json
    assert (answer["path"], answer["version"]) == ("models/export/7", 7)
    assert answer["certificate"]["samples"] == 9
    assert answer["certificate"]["conversion"]["fp32_modules"] == ["1"]


@pytest.mark.long
@pytest.mark.parametrize("factory", ["counting", "tagging", "few_classes"])
def test_whole_targets_that_are_no_classes_of_the_output_are_left_out(factory: str, export: Export) -> None:
    done = export(factory, "--max-abs-error", 1, "--min-agreement", 0, "--json", data="counts")
    certificate = done.json["certificate"]
    assert certificate["accuracy"] is None
    assert certificate["notes"][0].startswith("the held-out targets are no classes of output 'output")


@pytest.mark.long
def test_over_budget_writes_nothing_and_exits_with_3(export: Export) -> None:
    done = export("peaking", "--no-search", "--json", data="rows")
    assert (done.code, done.out, MODELS.exists()) == (3, "", False)
    assert "halfserve export: output 'output' (rounded): " in done.err
    assert "are NaN or infinite (limit 0)" in done.err


def test_the_certificate_and_the_twin_are_written_where_asked_for(export: Export) -> None:
    assert export("cnn", "--fp32-twin", "--certificate", "verdict.json", "--html", "page.html").code == 0
    assert read_certificate(Path("verdict.json").read_bytes()).passed
    assert "<html" in Path("page.html").read_text()
    assert (MODELS / "export" / "1" / "fp32" / "model.onnx").exists()


@pytest.mark.long
def test_what_training_pinned_stays_pinned(export: Export) -> None:
    done = export("cnn", "--json", policy="cuda+fp32:batch_norm")
    assert done.json["certificate"]["conversion"]["fp32_modules"] == ["1"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--min-agreement", 2), 2, "min_agreement is 2.0; expected a share from 0 to 1"),
        (("--name", "../x"), 1, "'../x' is no model name"),
        (("--name", ""), 1, "'' is no model name"),
        (("--keep-fp32", "zz"), 1, "keep_fp32 'zz' matches no parameter"),
        (("--samples", "s.npz"), 2, "--samples does not belong to a checkpoint"),
        (("--certificate", "cnn.pt"), 1, "cannot write the certificate to cnn.pt: that is another file of this command"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[object, ...], code: int, message: str, export: Export) -> None:
    done = export("cnn", *arguments)
    assert (done.code, sorted(path.name for path in Path().iterdir())) == (code, ["cnn.pt"])
    assert f"halfserve export: {message}" in done.err


def test_a_checkpoint_that_is_missing_or_broken_is_one_line(export: Export) -> None:
    Path("broken.pt").write_bytes(b"not a checkpoint")
    missing, broken = export(Path("missing.pt")), export(Path("broken.pt"))
    assert missing.code == broken.code == 1
    assert "halfserve export: there is no file or folder" in missing.err
    kinds = "MODULE:FACTORY, timm:NAME, torchvision:NAME, a Hugging Face folder, a checkpoint"
    assert f"is no file of a known kind; expected {kinds}" in broken.err


def test_a_factory_that_is_gone_is_one_line(export: Export) -> None:
    done = export("cnn", data="no_such_data")
    assert done.code == 1
    assert "halfserve export: 'tests.export.models:no_such_data': the module" in done.err


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
    return train(settings(folder / "run_command", model=f"{HERE}:{model}", data=f"{HERE}:{data}", epochs=1)).checkpoint


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
    model: str, data: str, names: list[str], export: Export, shell: Shell, tmp_path: Path
) -> None:
    checkpoint = trained(tmp_path, model, data)
    assert shell("check", checkpoint).code == 0
    certificate = export(checkpoint, "--json").json["certificate"]
    assert (certificate["passed"], certificate["samples"]) == (True, 20)
    assert certificate["accuracy"]["reference"] == pytest.approx(certificate["accuracy"]["rounded"], abs=0.06)
    assert inputs_of(MODELS) == [(names[0], ["batch", 6]), (names[1], ["batch"])]


def test_a_check_takes_several_inputs_from_the_data(shell: Shell) -> None:
    assert shell("check", f"{HERE}:reader", "--data", f"{HERE}:by_name", "--json").json["model"] == "Reader"


def test_other_sizes_than_the_batch_may_vary(export: Export, tmp_path: Path) -> None:
    done = export(trained(tmp_path, "together", "by_name"), "--dynamic", "batch.words.1=length")
    assert (done.code, "within budget" in done.out) == (0, True)
    assert inputs_of(MODELS) == [("batch.words", ["batch", "length"]), ("batch.lengths", ["batch"])]


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
def test_a_size_that_cannot_vary_is_one_line(option: str, code: int, message: str, export: Export, tmp_path: Path) -> None:
    done = export(trained(tmp_path, "reader", "by_name"), "--dynamic", option)
    assert (done.code, MODELS.exists()) == (code, False)
    assert message in done.err


@pytest.mark.long
def test_what_torchs_evaluation_mode_leaves_out_is_told_and_is_no_error(export: Export, tmp_path: Path) -> None:
    certificate = export(trained(tmp_path, "padded", "by_name"), "--json").json["certificate"]
    assert certificate["passed"]
    assert any("src_key_padding_mask" in note for note in certificate["notes"])
