from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from serve.backends.onnxruntime_backend import OnnxRuntime
from serve.backends.upcast import upcast_to_fp32
from serve.engine.backend import Placement
from serve.engine.config import Defaults
from serve.engine.errors import ModelLoadError
from serve.engine.model import Model
from serve.engine.model_repository import find_models, load_model
from tests.models import save_mlp


def write_versions(root: Path, *versions: str, name: str = "mlp", config: str | None = None) -> Path:
    for version in versions:
        save_mlp(root / name / version / "model.onnx")
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    return root


def found(root: Path) -> list[tuple[str, int]]:
    return [(files.name, files.version) for files in find_models(root)]


def load(path: Path) -> Model:
    (files,) = find_models(path)
    return load_model(files, OnnxRuntime(), Placement(use_gpu=False, threads=1), Defaults())


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


def test_a_version_is_what_its_plain_number_names(tmp_path: Path) -> None:
    """In whatever order the file system lists the folders."""
    root = write_versions(tmp_path, "1", *("0" * zeros + "1" for zeros in range(1, 41)), "02")
    assert [(files.version, files.model.parent.name) for files in find_models(root)] == [(2, "02")]
    (root / "mlp" / "config.pbtxt").write_text("version_policy { all {} }")
    assert [files.model.parent.name for files in find_models(root)] == ["1", "02"]


def test_versions_that_are_asked_for_and_missing_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_versions(tmp_path, "1", config="version_policy { specific { versions: [9, 1, 7] } }")
    assert found(root) == [("mlp", 1)]
    assert caplog.messages == [f"{root / 'mlp'}: version_policy asks for versions that are not there: 7, 9"]


def test_what_is_no_model_is_passed_over(tmp_path: Path) -> None:
    write_versions(tmp_path, "1", name=".half-written")
    write_versions(tmp_path, "1", "0", "draft", name="good")
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "good" / "2").mkdir()
    assert found(tmp_path) == [("good", 1)]


def test_a_bare_file_is_a_model_named_after_it(tmp_path: Path) -> None:
    save_mlp(tmp_path / "net.v2.onnx")
    (tmp_path / "config.pbtxt").write_text("this is not about the file beside it")
    model = load(tmp_path / "net.v2.onnx")
    assert (model.name, model.version, model.max_batch_size) == ("net.v2", 1, 32)


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
        (lambda root: write_versions(root, "1", config="version_policy { specific { versions: [4] } }"), "none of its version"),
    ],
)
def test_a_path_without_models_is_refused(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        find_models(make(tmp_path))  # type: ignore[operator]  # a lambda of the list above


def test_a_corrupt_model_is_refused_with_its_path(tmp_path: Path) -> None:
    root = write_versions(tmp_path, "1")
    (root / "mlp" / "1" / "model.onnx").write_bytes(b"\x08\x09 not onnx")
    with pytest.raises(ModelLoadError, match=r"mlp/1/model.onnx: is not .*ONNX"):
        load(root)


def test_two_instances_are_two_copies(tmp_path: Path) -> None:
    root = write_versions(tmp_path, "1", config="instance_group [{ count: 2 kind: KIND_CPU }]")
    model = load(root)
    first, second = model.backends
    x = np.ones((1, 64), first.compute_dtype("x"))
    np.testing.assert_array_equal(first.run({"x": x})["y"], second.run({"x": x})["y"])
    assert first is not second


def test_the_provider_and_the_precision_are_in_the_config(tmp_path: Path) -> None:
    config = load(write_versions(tmp_path, "1")).config
    assert config.parameters["halfserve.provider"].string_value == "CPUExecutionProvider"
    assert config.parameters["halfserve.precision"].string_value == "fp32 (the fp16 model, upcast)"


def test_a_gpu_instance_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.backends.onnxruntime_session.device_count", lambda: 0)
    root = write_versions(tmp_path, "1", config="instance_group [{ kind: KIND_GPU }]")
    (files,) = find_models(root)
    with pytest.raises(ModelLoadError, match="a GPU is required, but CUDA device 0 is not there"):
        load_model(files, OnnxRuntime(), Placement(), Defaults())


def labelled(name: str) -> str:
    return f'max_batch_size: 4 output {{ name: "y" data_type: TYPE_FP16 dims: 10 label_filename: "{name}" }}'


def test_labels_lie_beside_the_configuration(tmp_path: Path) -> None:
    root = write_versions(tmp_path, "1", config=labelled("names.txt"))
    (root / "mlp" / "names.txt").write_text("cat\ndog\n")
    assert load(root).labels == {"y": ["cat", "dog"]}


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("a\u0085b\nc\u2028d\fe\n", ["a\u0085b", "c\u2028d\fe"]),
        ("\ufeffcat\r\n\r\ndog", ["cat", "", "dog"]),
        ("cat\n\n", ["cat", ""]),
        ("", []),
    ],
)
def test_every_line_is_one_label(tmp_path: Path, content: str, names: list[str]) -> None:
    root = write_versions(tmp_path, "1", config=labelled("names.txt"))
    (root / "mlp" / "names.txt").write_bytes(content.encode())
    assert load(root).labels == {"y": names}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none.txt", "cannot read the labels 'none.txt': No such file or directory"),
        ("../1/x.txt", "label_filename is '../1/x.txt', expected a file name without folders"),
        ("a\\000b", r"label_filename is 'a\\x00b', expected a file name without folders or NUL characters"),
    ],
)
def test_labels_that_cannot_be_read_are_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        load(write_versions(tmp_path, "1", config=labelled(name)))


def test_labels_that_are_no_text_are_refused(tmp_path: Path) -> None:
    root = write_versions(tmp_path, "1", config=labelled("names.txt"))
    (root / "mlp" / "names.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match="cannot read the labels 'names.txt': it is not UTF-8 text"):
        load(root)


def test_labels_may_be_a_link_in_the_repository_and_not_out_of_it(tmp_path: Path) -> None:
    root = write_versions(tmp_path / "repository", "1", config=labelled("names.txt"))
    (tmp_path / "secret").write_text("of another\n")
    names = root / "mlp" / "names.txt"
    names.symlink_to(tmp_path / "secret")
    with pytest.raises(ModelLoadError, match="mlp/names.txt: is a link out of the repository, expected what lies in it"):
        load(root)
    names.unlink()
    (root / "shared.txt").write_text("cat\ndog\n")
    names.symlink_to(root / "shared.txt")
    assert load(root).labels == {"y": ["cat", "dog"]}


def test_a_configuration_that_is_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    root = write_versions(tmp_path, "1")
    (root / "mlp" / "config.pbtxt").symlink_to("config.pbtxt")
    with pytest.raises(ModelLoadError, match="config.pbtxt: (is a link that leads to itself|cannot be read)"):
        find_models(root)


@pytest.mark.parametrize("half", [True, False])
def test_weights_that_are_a_link_out_of_the_repository_are_refused(tmp_path: Path, half: bool) -> None:
    root = write_versions(tmp_path / "repository", "1")
    path = root / "mlp" / "1" / "model.onnx"
    model = onnx.load(path)
    if not half:
        upcast_to_fp32(model)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    weights = path.with_name("weights.bin")
    load(root)
    weights.rename(tmp_path / "weights.bin")
    weights.symlink_to(tmp_path / "weights.bin")
    with pytest.raises(ModelLoadError, match="symbolic link|escapes model directory"):
        load(root)
