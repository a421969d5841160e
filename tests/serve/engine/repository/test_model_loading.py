"""Loading one version: labels, placement, declared outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.onnx_preparation import UPCAST, retype
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults, config_from_json
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_model, find_models
from tests.models import save_mlp, save_text
from tests.serve.engine.model_folders import load, write_versions


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
    monkeypatch.setattr("halfserve.serve.backends.onnx_runtime.session.device_count", lambda: 0)
    root = write_versions(tmp_path, "1", config="instance_group [{ kind: KIND_GPU }]")
    (files,) = find_models(root)
    with pytest.raises(ModelLoadError, match="a GPU is required, but CUDA device 0 is not there.*KIND_CPU"):
        load_model(files, OnnxRuntime(), DevicePlacement(), Defaults())


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


def test_labels_may_be_a_link_within_the_repository_only(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("half", [True, False])
def test_weights_that_are_a_link_out_of_the_models_folder_are_refused(tmp_path: Path, half: bool) -> None:
    root = write_versions(tmp_path / "repository", "1")
    path = root / "mlp" / "1" / "model.onnx"
    model = onnx.load(path)
    if not half:
        retype(model, UPCAST)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    weights = path.with_name("weights.bin")
    load(root)
    weights.rename(tmp_path / "weights.bin")
    weights.symlink_to(tmp_path / "weights.bin")
    with pytest.raises(
        ModelLoadError, match=r"weights.bin: is a link out of the model's folder, expected what lies in it; copy it there$"
    ):
        load(root)


def test_a_bare_file_may_keep_weights_beside_it_and_nowhere_else(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "folder" / "net.onnx")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    for declared in (None, config_from_json("{}", path / "net")):
        (files,) = find_model(path, "net", declared)
        load_model(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
        weights = path.with_name("weights.bin").rename(tmp_path / "weights.bin")
        path.with_name("weights.bin").symlink_to(weights)
        with pytest.raises(ModelLoadError, match=r"weights.bin: is a link out of the model's folder"):
            load_model(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
        weights.replace(path.with_name("weights.bin"))


ROWS = 'output { name: "twice" data_type: TYPE_FP32 dims: 3 }'
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def write(root: Path, config: str) -> Path:
    """x [batch, 3] -> total, which has no rows; root and twice, which have."""
    text = """(float[batch, 3] x) => (float total, float[batch, 3] root, float[batch, 3] twice) {
        twice = Add(x, x)  root = Sqrt(x)  total = ReduceSum<keepdims = 0>(x) }"""
    for folder in (root / "m" / "1", root / "m" / "1" / "fp32"):
        save_text(folder / "model.onnx", text)
    (root / "m" / "config.pbtxt").write_text(config)
    return root


def test_outputs_that_are_not_listed_are_not_there(tmp_path: Path) -> None:
    model = load(write(tmp_path, ROWS.replace("dims: 3", "dims: [-1, 3]")))
    assert list(model.outputs) == ["twice"]
    assert [entry.name for entry in model.config.output] == ["twice"]
    answer = model.backends[0].run({"x": X})
    assert list(answer) == ["twice"]
    np.testing.assert_array_equal(answer["twice"], 2 * X)


def test_without_declared_outputs_all_exist(tmp_path: Path) -> None:
    model = load(write(tmp_path, "max_batch_size: 0"))
    assert list(model.outputs) == list(model.backends[0].run({"x": X})) == ["total", "root", "twice"]


def test_outputs_that_are_not_listed_need_not_have_rows(tmp_path: Path) -> None:
    model = load(write(tmp_path, f"max_batch_size: 8 {ROWS}"))
    assert (model.max_batch_size, model.outputs["twice"].shape) == (8, (-1, 3))
    with pytest.raises(ModelLoadError, match="not every input and output of the model begins with a dimension of any size"):
        load(write(tmp_path, "max_batch_size: 8"))


def test_an_output_that_is_not_in_the_file_is_named_beside_all_that_are(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="output 'three' is not in the model, which has 'root', 'total', 'twice'"):
        load(write(tmp_path, f"max_batch_size: 0 {ROWS.replace('twice', 'three')}"))


def test_the_twin_answers_the_same_outputs(tmp_path: Path) -> None:
    guard = 'parameters { key: "halfserve.precision_guard" value { string_value: "fallback" } }'
    model = load(write(tmp_path, f"max_batch_size: 8 {ROWS} {guard}"))
    assert model.guard is not None
    assert list(model.outputs) == ["twice"]


def test_every_copy_leaves_them_out(tmp_path: Path) -> None:
    model = load(write(tmp_path, f"max_batch_size: 8 {ROWS} instance_group {{ count: 2 kind: KIND_CPU }}"))
    assert [list(copy.run({"x": X})) for copy in model.backends] == [["twice"], ["twice"]]


def test_a_copy_that_is_given_up_computes_no_further(tmp_path: Path) -> None:
    copy = load(write(tmp_path, f"max_batch_size: 8 {ROWS}")).backends[0]
    copy.give_up()
    with pytest.raises(BackendError, match="failed on this request"):
        copy.run({"x": X})
