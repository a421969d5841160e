"""What every backend must do; each test runs over all of them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from protos.model_config_pb2 import ModelConfig
from serve.backends.runtimes import Runtimes
from serve.engine.backend import Backend, DevicePlacement, ModelInterface
from serve.engine.config.model_config import Defaults
from serve.engine.errors import BackendError, ModelLoadError
from serve.engine.repository.loaded_version import load_model
from serve.engine.repository.model_repository import find_models
from serve.engine.tensors import Array
from tests.models import mlp_weights

ON_CPU = DevicePlacement(use_gpu=False, threads=1)
KINDS = ("onnx", "torch")


@pytest.fixture(scope="module")
def runtimes() -> Runtimes:
    return Runtimes(trust_torch_archives=True)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def load(runtimes: Runtimes, folder: Path, name: str) -> tuple[ModelInterface, Backend]:
    (path,) = (folder / name / "1").iterdir()
    interface = runtimes.describe(path)
    return interface, runtimes.load(path, interface, ON_CPU, ModelConfig())


def expected_mlp(x: Array) -> Array:
    first, second = (w.astype(np.float32) for w in mlp_weights())
    return np.asarray(np.maximum(x.astype(np.float32) @ first, 0) @ second)


def test_the_interface_is_as_clients_see_it(runtimes: Runtimes, folder: Path) -> None:
    interface, _ = load(runtimes, folder, "mlp")
    told = [(spec.name, spec.datatype.wire, spec.shape) for spec in (*interface.inputs, *interface.outputs)]
    assert told == [("x", "FP16", (-1, 64)), ("y", "FP16", (-1, 10))]
    assert interface.batched
    assert not load(runtimes, folder, "unbatched")[0].batched


@pytest.mark.parametrize("rows", [1, 7])
def test_the_cpu_computes_an_fp16_model_in_fp32_and_answers_in_fp16(runtimes: Runtimes, folder: Path, rows: int) -> None:
    _, backend = load(runtimes, folder, "mlp")
    assert backend.precision == "fp32 (the fp16 model, upcast)"
    assert backend.compute_dtype("x") == np.float16
    x = np.random.default_rng(2).standard_normal((rows, 64)).astype(np.float16)
    y = backend.run({"x": x})["y"]
    assert y.dtype == np.float16
    # Half a unit in the last place of fp16: nothing but the last rounding is lost.
    np.testing.assert_allclose(y.astype(np.float32), expected_mlp(x), rtol=2**-11, atol=1e-6)


def test_an_overflow_of_fp16_is_an_infinity(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "twice")
    y = backend.run({"x": np.array([[60000.0], [1.0], [np.nan]], np.float16)})["y"]
    np.testing.assert_array_equal(y, np.array([[np.inf], [2.0], [np.nan]], np.float16), strict=True)


def test_a_bf16_model_takes_and_gives_bf16(runtimes: Runtimes, folder: Path) -> None:
    interface, backend = load(runtimes, folder, "twice_bf16")
    assert [spec.datatype.wire for spec in (*interface.inputs, *interface.outputs)] == ["BF16", "BF16"]
    assert backend.precision == "fp32 (the bf16 model, upcast)"
    x = np.array([[1.5], [3e38]], ml_dtypes.bfloat16)
    y = backend.run({"x": x.astype(backend.compute_dtype("x"))})["y"]
    np.testing.assert_array_equal(y, np.array([[3.0], [np.inf]], ml_dtypes.bfloat16), strict=True)


def test_a_request_that_cannot_be_computed_is_a_backend_error(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "picky")
    with pytest.raises(BackendError, match="the model failed on this request: .*(?i:ind(ex|ices)).* out of"):
        backend.run({"i": np.array([[5]])})
    assert backend.run({"i": np.array([[1]])})["y"].tolist() == [[20.0]]


def test_read_only_and_unaligned_inputs_are_left_as_they_are(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "twice")
    raw = b"\x00" + np.array([[1.0], [2.0]], np.float16).tobytes()
    x = np.frombuffer(raw, np.float16, 2, 1).reshape(2, 1)
    assert backend.run({"x": x.astype(np.float16, copy=not x.flags.aligned)})["y"].tolist() == [[2.0], [4.0]]
    assert x.tolist() == [[1.0], [2.0]]


def test_an_answer_is_never_a_view_on_its_input(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "same")
    x = np.array([[1.0], [2.0]], np.float32)
    y = backend.run({"x": x})["y"]
    assert not np.shares_memory(x, y)
    x[:] = 0
    assert y.tolist() == [[1.0], [2.0]], "the buffer may hold the next batch by now"


def test_the_answers_of_one_batch_outlive_the_next(runtimes: Runtimes, folder: Path) -> None:
    _, backend = load(runtimes, folder, "twice")
    first = backend.run({"x": np.array([[1.0]], np.float16)})["y"]
    backend.run({"x": np.array([[8.0]], np.float16)})
    assert first.tolist() == [[2.0]]


def test_a_whole_repository_is_loaded(runtimes: Runtimes, folder: Path) -> None:
    models = [load_model(files, runtimes, ON_CPU, Defaults()) for files in find_models(folder)]
    sizes = {model.name: model.max_batch_size for model in models}
    assert sizes == {"mlp": 32, "picky": 32, "same": 32, "twice": 32, "twice_bf16": 32, "unbatched": 0}
    (kind,) = {model.interface.kind for model in models}
    assert {(m.config.platform, m.config.backend) for m in models} == {(kind.platform, kind.backend)}


@pytest.mark.parametrize("asked", ['backend: "tensorrt_plan"', 'platform: "onnxruntime_onnx" backend: "pytorch"'])
def test_a_backend_that_is_not_the_files_is_refused(runtimes: Runtimes, folder: Path, tmp_path: Path, asked: str) -> None:
    (path,) = (folder / "mlp" / "1").iterdir()
    (tmp_path / "mlp" / "1").mkdir(parents=True)
    (tmp_path / "mlp" / "1" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "mlp" / "config.pbtxt").write_text(asked)
    with pytest.raises(ModelLoadError, match="models are not supported, expected platform '.*' or backend '.*' for this"):
        load_model(find_models(tmp_path)[0], runtimes, ON_CPU, Defaults())


def test_the_configuration_chooses_between_two_files(runtimes: Runtimes, folders: dict[str, Path], tmp_path: Path) -> None:
    version = tmp_path / "mlp" / "1"
    version.mkdir(parents=True)
    for kind in KINDS:
        (path,) = (folders[kind] / "mlp" / "1").iterdir()
        (version / path.name).write_bytes(path.read_bytes())
    for config, file_name in (
        ("", "model.onnx"),
        ('backend: "pytorch"', "model.pt2"),
        ('platform: "onnxruntime_onnx"', "model.onnx"),
        ('default_model_filename: "model.pt2"', "model.pt2"),
    ):
        (tmp_path / "mlp" / "config.pbtxt").write_text(config)
        (files,) = find_models(tmp_path)
        assert files.model.name == file_name, config
        assert load_model(files, runtimes, ON_CPU, Defaults()).interface.kind.file_name == file_name


def test_a_file_that_is_not_there_is_named(runtimes: Runtimes, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent.onnx: cannot be read: No such file"):
        runtimes.describe(tmp_path / "absent.onnx")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_is_not_there_is_refused(
    runtimes: Runtimes, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("serve.backends.onnx_runtime.session.device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (path,) = (folders[kind] / "mlp" / "1").iterdir()
    with pytest.raises(ModelLoadError, match="a GPU is required, but .*CUDA device 0"):
        runtimes.load(path, runtimes.describe(path), DevicePlacement(require_gpu=True), ModelConfig())
