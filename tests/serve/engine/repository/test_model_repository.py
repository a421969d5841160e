"""Which models and versions a path holds."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import pytest

from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import ModelRepository, find_models, model_names
from tests.models import save_mlp
from tests.serve.engine.model_folders import found, load, write_versions


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, [10]),
        ("version_policy { latest { num_versions: 2 } }", [2, 10]),
        ("version_policy { all {} }", [1, 2, 10]),
        ("version_policy { specific { versions: [1, 2, 7] } }", [1, 2]),
    ],
)
def test_the_version_policy_chooses(tmp_path: Path, policy: str | None, expected: list[int]) -> None:
    root = write_versions(tmp_path, "1", "2", "10", config=policy)
    assert found(root) == [("mlp", version) for version in expected]


def test_another_configuration_is_taken_by_its_name_where_it_is_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_versions(tmp_path, "1", "2", name=name, config='output { name: "y" label_filename: "labels.txt" }')
    (tmp_path / "a" / "configs").mkdir()
    (tmp_path / "a" / "configs" / "small.pbtxt").write_text("version_policy { specific { versions: 1 } }")
    repository = ModelRepository(tmp_path, config_name="small")
    (files,) = repository.find("a")
    assert (files.version, files.config.source.name, files.config.model_folder) == (1, "small.pbtxt", tmp_path / "a")
    (other,) = repository.find("b")
    assert (other.version, other.config.source.name) == (2, "config.pbtxt")


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ("", "has no platform or backend, no input with data_type and dims, no output with data_type and dims"),
        ('backend: "onnxruntime" input { name: "x" } output { name: "y" data_type: TYPE_FP32 dims: 1 }', "has no input with"),
    ],
)
def test_an_incomplete_configuration_is_refused_on_request(tmp_path: Path, config: str, missing: str) -> None:
    root = write_versions(tmp_path, "1", config=config)
    assert ModelRepository(root).find("mlp")
    with pytest.raises(ModelLoadError, match=missing):
        ModelRepository(root, needs_config=True).find("mlp")


def test_versions_with_leading_zeros_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Triton, where they are no versions."""
    root = write_versions(tmp_path, "0", "01", "1", "003", config="version_policy { all {} }")
    assert [files.model.parent.name for files in find_models(root)] == ["1"]
    assert "003: is passed over: a version's number has no leading zeros" in caplog.text


def test_versions_that_are_asked_for_and_missing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_versions(tmp_path, "1", config="version_policy { specific { versions: [9, 1, 7] } }")
    assert found(root) == [("mlp", 1)]
    assert caplog.messages == [f"{root / 'mlp'}: version_policy asks for versions that are not there: 7, 9"]


def test_folders_that_are_not_models_are_ignored(tmp_path: Path) -> None:
    write_versions(tmp_path, "1", name=".half-written")
    write_versions(tmp_path, "1", "0", "draft", name="good")
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "good" / "2").mkdir()
    assert found(tmp_path) == [("good", 1)]


def test_a_folder_whose_name_is_not_utf8_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_mlp(tmp_path / "good" / "1" / "model.onnx")
    save_mlp(tmp_path / os.fsdecode(b"b\xe4d") / "1" / "model.onnx")
    assert [files.name for files in find_models(tmp_path)] == ["good"]
    find_models(tmp_path)
    assert [record.getMessage().count("its name is not UTF-8") for record in caplog.records] == [1]


def test_a_bare_file_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "m.onnx").rename(tmp_path / os.fsdecode(b"b\xe4d.onnx"))
    with pytest.raises(ModelLoadError, match=r"b\\udce4d\.onnx': the model's name is not UTF-8.*rename the file"):
        find_models(path)


def test_a_model_may_lie_in_a_folder_with_its_files_name(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "mlp" / "1" / "model.onnx" / "model.onnx")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert found(tmp_path) == [("mlp", 1)]
    assert load(tmp_path).path == path
    renamed = write_versions(tmp_path / "other", "1", config='default_model_filename: "net"')
    (renamed / "mlp" / "1" / "net").mkdir()
    (renamed / "mlp" / "1" / "model.onnx").rename(renamed / "mlp" / "1" / "net" / "model.onnx")
    assert found(renamed) == [("mlp", 1)]


def test_a_bare_file_is_a_model_named_after_it(tmp_path: Path) -> None:
    save_mlp(tmp_path / "net.v2.onnx")
    (tmp_path / "config.pbtxt").write_text("this is not about the file beside it")
    model = load(tmp_path / "net.v2.onnx")
    assert (model.name, model.version, model.max_batch_size) == ("net.v2", 1, 32)


def foreign(root: Path, config: str) -> Path:
    """A model of which this server could read no file."""
    (root / "mlp" / "1").mkdir(parents=True)
    (root / "mlp" / "1" / "model.bin").touch()
    (root / "mlp" / "config.pbtxt").write_text(config)
    return root


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "absent", "absent: not found; expected a model repository folder or an .onnx file"),
        (lambda root: root, "no models in it; expected <model>/<version>/model.onnx"),
        (lambda root: write_versions(root, "1") / "mlp", "it looks like one model's own folder: serve .*"),
        (lambda root: write_versions(root, "1") / "mlp" / "1", "it looks like one version's own folder: serve .*"),
        (lambda root: write_versions(root, "v1", config=""), "mlp: has no version; expected a folder with a number for a name"),
        (
            lambda root: write_versions(root, "1", config='default_model_filename: "../../etc/passwd"'),
            "a file name without folders",
        ),
        (
            lambda root: write_versions(root, "1", config='default_model_filename: "a\\000b"'),
            "without folders or NUL characters",
        ),
        (lambda root: write_versions(root, "1", config='default_model_filename: "other.onnx"'), "none of its version folders"),
        (
            lambda root: write_versions(root, "1", "2", config="version_policy { specific { versions: [4, 5] } }"),
            "mlp: version_policy asks for 4, 5, expected one of those that are there: 1, 2",
        ),
        (
            lambda root: write_versions(root, "1", config="version_policy { specific { } }"),
            "mlp: version_policy asks for no version, expected one of those that are there: 1",
        ),
        (lambda root: foreign(root, 'backend: "tensorrt_plan"'), "mlp/config.pbtxt: 'tensorrt_plan' models are not supported"),
        (
            lambda root: foreign(root, 'platform: "onnxruntime_onnx" backend: "dali"'),
            "mlp/config.pbtxt: 'dali' models are not supported",
        ),
        (
            lambda root: foreign(root, 'platform: "onnxruntime_onnx" ensemble_scheduling {}'),
            "mlp/config.pbtxt: ensemble_scheduling is not supported; set platform: 'ensemble'",
        ),
        (
            lambda root: foreign(root, 'platform: "ensemble" version_policy { specific { versions: [4] } }'),
            "mlp: version_policy asks for versions that are not there, expected some of 1",
        ),
    ],
)
def test_a_path_without_models_is_refused(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        find_models(make(tmp_path))  # type: ignore[operator]  # a lambda of the list above


@pytest.mark.parametrize(("folders", "versions"), [((), [1]), (("1",), [1]), (("2", "7"), [7])])
def test_an_ensemble_needs_no_file_and_no_version(tmp_path: Path, folders: tuple[str, ...], versions: list[int]) -> None:
    for folder in ("", *folders):
        (tmp_path / "pipe" / folder).mkdir()
    (tmp_path / "pipe" / "config.pbtxt").write_text('platform: "ensemble"')
    assert [(files.name, files.version, files.model.name) for files in find_models(tmp_path)] == [
        ("pipe", version, "config.pbtxt") for version in versions
    ]


def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=": cannot be read: File name too long"):
        model_names(tmp_path / ("a" * 300))


def test_a_version_that_is_asked_for_and_has_no_file_is_refused_for_that(tmp_path: Path) -> None:
    root = write_versions(tmp_path, "1", config="version_policy { specific { versions: [2] } }")
    (root / "mlp" / "2").mkdir()
    with pytest.raises(ModelLoadError, match="none of its version folders to be served holds model.onnx"):
        find_models(root)


def test_a_configuration_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    root = write_versions(tmp_path, "1")
    (root / "mlp" / "config.pbtxt").symlink_to("config.pbtxt")
    with pytest.raises(ModelLoadError, match="config.pbtxt: (is a link that leads to itself|cannot be read)"):
        find_models(root)
