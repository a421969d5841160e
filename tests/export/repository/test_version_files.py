from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format

from export.certificate.certificate import Certificate
from export.errors import ExportError
from export.files.model_file import open_model
from export.repository.model_version_writer import write_model_version
from export.repository.version_files import FP32_TWIN
from protos.model_config_pb2 import ModelConfig
from serve.engine.repository.model_repository import find_models
from tests.export.onnx_files import in_one_file, sums, with_data_files

Certify = Callable[[onnx.ModelProto], Certificate]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def certify_file(certify: Certify) -> Callable[[Path], Certificate]:
    return lambda path: dataclasses.replace(certify(sums(1, 4)), onnx_sha256=open_model(path).sha256)


CertifyFile = Callable[[Path], Certificate]


def test_data_files_travel_along(tmp_path: Path, certify_file: CertifyFile) -> None:
    path = with_data_files(sums(dtype=np.float16, size=1024), tmp_path / "m.onnx", files=2)
    written = write_model_version(tmp_path / "models", "m", path, certify_file(path), max_batch_size=0)
    assert tree(written) == ["certificate.json", "m.0.bin", "m.1.bin", "model.onnx"]
    assert open_model(written / "model.onnx").sha256 == open_model(path).sha256
    x = np.ones(1024, np.float16)
    runs = [onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]) for file in (path, written / "model.onnx")]
    np.testing.assert_array_equal(*(run.run(None, {"x": x})[0] for run in runs))


def test_the_twin_has_a_folder_of_its_own_and_the_config_names_it(tmp_path: Path, certify_file: CertifyFile) -> None:
    (tmp_path / "half").mkdir()
    half = with_data_files(sums(dtype=np.float16, size=1024), tmp_path / "half" / "w.onnx")
    twin = with_data_files(sums(size=1024), tmp_path / "w.onnx")  # with a data file of the same name
    written = write_model_version(tmp_path / "models", "m", half, certify_file(half), fp32_twin=twin, max_batch_size=0)
    assert tree(written) == ["certificate.json", "fp32/model.onnx", "fp32/w.0.bin", "model.onnx", "w.0.bin"]
    assert open_model(written / FP32_TWIN).proto == sums(size=1024)
    config = text_format.Parse((written.parent / "config.pbtxt").read_text(), ModelConfig())
    assert (written / config.parameters["halfserve.fp32_twin"].string_value).is_file()


def test_a_server_takes_the_fp16_model_and_minds_nothing_else(tmp_path: Path, certify: Certify) -> None:
    half = sums(dtype=np.float16)
    write_model_version(tmp_path, "m", half, certify(half), fp32_twin=sums(), max_batch_size=0)
    files = find_models(tmp_path)
    assert [(file.name, file.version, file.model) for file in files] == [("m", 1, tmp_path / "m" / "1" / "model.onnx")]


def test_a_config_that_does_not_name_the_twin_is_kept(tmp_path: Path, certify: Certify) -> None:
    half = sums(dtype=np.float16)
    write_model_version(tmp_path, "m", half, certify(half), max_batch_size=0)
    before = (tmp_path / "m" / "config.pbtxt").read_bytes()
    written = write_model_version(tmp_path, "m", half, certify(half), fp32_twin=sums(), max_batch_size=0)
    assert (tmp_path / "m" / "config.pbtxt").read_bytes() == before
    assert (written / FP32_TWIN).is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name", "the float32 twin is of another model: its input 'x' is absent, the fp16 model's is floating"),
        ("type", "its output 'y' is INT64, the fp16 model's is floating"),
    ],
)
def test_a_twin_of_another_model_is_refused(change: str, message: str, tmp_path: Path, certify: Certify) -> None:
    twin, half = sums(), sums(dtype=np.float16)
    if change == "name":
        twin.graph.input[0].name = twin.graph.node[0].input[0] = "z"
    else:
        twin.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(ExportError, match=message):
        write_model_version(tmp_path, "m", half, certify(half), fp32_twin=twin, max_batch_size=0)
    assert tree(tmp_path) == []


def test_a_certificate_without_the_data_files_does_not_do(tmp_path: Path, certify: Certify) -> None:
    path = with_data_files(sums(dtype=np.float16, size=1024), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="the certificate belongs to another model"):
        write_model_version(tmp_path / "models", "m", path, certify(onnx.load(path)), max_batch_size=0)


def test_a_model_that_changes_while_it_is_copied_is_found_out(tmp_path: Path, certify_file: CertifyFile) -> None:
    path = in_one_file(sums(dtype=np.float16), tmp_path / "m.onnx")
    opened, certificate = open_model(path), certify_file(path)
    assert opened.sha256 == certificate.onnx_sha256
    in_one_file(sums(2, dtype=np.float16), path)
    with pytest.raises(ExportError, match="m.onnx changed while it was copied; verify it again"):
        write_model_version(tmp_path / "models", "m", opened, certificate, max_batch_size=0)
    assert tree(tmp_path / "models") == []


def test_a_data_file_with_a_name_that_the_layout_needs_is_refused(tmp_path: Path, certify_file: CertifyFile) -> None:
    model = sums(dtype=np.float16, size=1024)
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "certificate.json")
    onnx.save_model(model, tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="keeps weights in 'certificate.json', a name that the repository needs"):
        write_model_version(tmp_path / "models", "m", tmp_path / "m.onnx", certify_file(tmp_path / "m.onnx"), max_batch_size=0)
    assert tree(tmp_path / "models") == []
