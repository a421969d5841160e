"""What ONNX Runtime's CUDA provider does on the emulated device. test_on_emulated_device.py runs it in a process of its own."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnxruntime_backend import OnnxRuntimeBackend
from serve.engine.backend import Placement
from serve.engine.cuda_driver import DRIVER_NAMES
from serve.engine.device_faults import is_device_lost
from serve.engine.errors import BackendError, ModelLoadError
from serve.engine.tensors import Array
from tests.serve.backends.loading import load_backend

ILLEGAL_ADDRESS, OLD_DRIVER = 700, 35
COLUMNS = 4


@pytest.fixture(scope="module")
def device() -> ctypes.CDLL:
    """The emulated one's own functions."""
    library = ctypes.CDLL(DRIVER_NAMES[0])
    library.emulated_log.restype = ctypes.c_char_p
    library.emulated_limit.argtypes = (ctypes.c_size_t,)
    return library


@pytest.fixture(autouse=True)
def healthy(device: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ort, "preload_dlls", lambda: None)  # a real runtime may be installed, and takes precedence
    gc.collect()
    device.emulated_log()
    yield
    device.emulated_fail(0)


def log(device: ctypes.CDLL) -> list[str]:
    """What has been done since this was asked for last."""
    text: bytes = device.emulated_log()
    return text.decode().splitlines()


def save(path: Path, *, sized: bool = False) -> Path:
    """A model that copies rows of COLUMNS; with `sized`, whatever comes, in the shape that its second input says."""
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["n"] if sized else ["n", COLUMNS])]
    inputs += [value("s", TensorProto.INT64, [2])] if sized else []
    nodes = [helper.make_node("Reshape", ["x", "s"], ["t"]), helper.make_node("Identity", ["t"], ["y"])]
    kept = [] if sized else [helper.make_tensor("s", TensorProto.INT64, [3], [-1, 2, COLUMNS // 2])]
    outputs = [value("y", TensorProto.FLOAT, ["a", "b"] if sized else ["n", 2, COLUMNS // 2])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, kept)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def with_graphs(**parameters: str) -> ModelConfig:
    config = ModelConfig()
    config.optimization.cuda.graphs = True
    for key, text in parameters.items():
        config.parameters[key].string_value = text
    return config


def load(path: Path, config: ModelConfig | None = None, *, sized: bool = False) -> OnnxRuntimeBackend:
    return load_backend(save(path, sized=sized), Placement(), config)


def rows(count: int, start: int = 0) -> dict[str, Array]:
    return {"x": np.arange(start, start + count * COLUMNS, dtype=np.float32).reshape(count, COLUMNS)}


def check(backend: OnnxRuntimeBackend, count: int, start: int = 0) -> None:
    answer = backend.run(rows(count, start))["y"]
    assert answer.ravel().tolist() == list(range(start, start + count * COLUMNS))


def test_answers_are_those_of_the_request_at_hand(tmp_path: Path, device: ctypes.CDLL) -> None:
    plain, graphs = load(tmp_path / "p.onnx"), load(tmp_path / "g.onnx", with_graphs())
    assert plain.provider == graphs.provider == "CUDAExecutionProvider"
    for turn, count in enumerate([2, 3, 2, 3, 2, 3, 1]):
        for backend in (plain, graphs):
            check(backend, count, 100 * turn)
    assert log(device).count("replay") == 4


@pytest.mark.parametrize("require_gpu", [False, True])
def test_a_lost_device_is_told_and_ends_nothing(tmp_path: Path, device: ctypes.CDLL, *, require_gpu: bool) -> None:
    backends = [load(tmp_path / "p.onnx")]
    for backend in backends * 2:
        check(backend, 2)
    device.emulated_fail(ILLEGAL_ADDRESS)
    for backend in backends:
        with pytest.raises(BackendError, match=r"request: CUDA failure 700: an illegal memory access was encountered$") as lost:
            backend.run(rows(2))
        assert is_device_lost(lost.value)
    with pytest.raises(ModelLoadError, match=r"illegal memory access was encountered$") as refused:
        load_backend(tmp_path / "p.onnx", Placement(require_gpu=require_gpu))
    assert is_device_lost(refused.value)
    del backend
    backends.clear()
    gc.collect()


def test_why_a_device_cannot_be_used_is_told(
    tmp_path: Path, device: ctypes.CDLL, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    device.emulated_fail(OLD_DRIVER)
    assert load(tmp_path / "m.onnx").provider == "CPUExecutionProvider"
    reason = "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version"
    assert f"m.onnx: ONNX Runtime cannot use CUDA device 0 ({reason}); it runs on the CPU" in caplog.text
    with pytest.raises(ModelLoadError, match=f"a GPU is required, but .*{reason}"):
        load_backend(tmp_path / "m.onnx", Placement(require_gpu=True))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("nosuch", "1", 'Unknown provider option: "nosuch"'),
        ("cudnn_conv_algo_search", "BEST", 'Failed to parse provider option "cudnn_conv_algo_search"'),
    ],
)
def test_an_option_that_cannot_be_read_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str, text: str, reason: str
) -> None:
    config = ModelConfig()
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="cuda")
    accelerator.parameters[option] = text
    with pytest.raises(ModelLoadError, match=f"m.onnx: ONNX Runtime refuses the model: {reason}"):
        load(tmp_path / "m.onnx", config)
    assert capfd.readouterr().out == ""
