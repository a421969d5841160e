from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.cuda import DriverCopies, GraphReplays
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.cuda_driver import CudaDriver, device_count
from halfserve.serve.engine.errors import BackendError, InvalidArgumentError, ModelLoadError
from halfserve.serve.engine.tensors import Array
from tests.models import mlp_weights, save_echo_types, save_mlp, save_model, save_picky, save_unbatched
from tests.serve.backends.support import load_backend

ON_CPU = DevicePlacement(use_gpu=False, threads=1)
FP16 = TensorProto.FLOAT16


def expected_mlp(x: np.ndarray[tuple[int, int], np.dtype[np.float16]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    first, second = (w.astype(np.float32) for w in mlp_weights())
    return np.asarray(np.maximum(x.astype(np.float32) @ first, 0) @ second)


def test_the_cpu_computes_an_fp16_model_in_fp32_and_answers_in_fp16(tmp_path: Path) -> None:
    backend = load_backend(save_mlp(tmp_path / "m.onnx"), ON_CPU)
    assert (backend.provider, backend.precision) == ("CPUExecutionProvider", "fp32 (the fp16 model, upcast)")
    assert backend.compute_dtype("x") == np.float16
    x = np.random.default_rng(2).standard_normal((7, 64)).astype(np.float16)
    y = backend.run({"x": x})["y"]
    assert y.dtype == np.float16
    # Half a unit in the last place of fp16: nothing but the last rounding is lost.
    np.testing.assert_allclose(y.astype(np.float32), expected_mlp(x), rtol=2**-11, atol=1e-6)


def test_an_overflow_of_fp16_is_an_infinity_and_no_warning(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [("x", FP16, ["batch", 1])], [("y", FP16, ["batch", 1])])
    y = load_backend(path, ON_CPU).run({"x": np.array([[60000.0], [1.0]], np.float16)})["y"]
    assert y.tolist() == [[np.inf], [2.0]]


def test_every_datatype_passes_through(tmp_path: Path) -> None:
    backend = load_backend(save_echo_types(tmp_path / "m.onnx"), ON_CPU)
    interface = OnnxRuntime().describe(tmp_path / "m.onnx")
    inputs = {spec.name: np.ones((1, 2), backend.compute_dtype(spec.name)) for spec in interface.inputs}
    inputs["in_BYTES"][...] = "gr\u00fcn".encode()
    outputs = backend.run(inputs)
    assert outputs["out_BYTES"].tolist() == [["gr\u00fcn"] * 2]
    for spec in interface.outputs:
        assert outputs[spec.name].dtype == spec.datatype.numpy, spec.name


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [("x", TensorProto.STRING, ["b"])], [("y", TensorProto.STRING, ["b"])])
    broken = np.array([b"\xff"], object)
    with pytest.raises(InvalidArgumentError, match="input 'x' has a BYTES element that is not UTF-8"):
        load_backend(path, ON_CPU).run({"x": broken})


def test_a_request_that_the_model_cannot_compute_is_a_backend_error(tmp_path: Path) -> None:
    backend = load_backend(save_picky(tmp_path / "m.onnx"), ON_CPU)
    with pytest.raises(BackendError, match="the model failed on this request: .*indices element out of data bounds"):
        backend.run({"i": np.array([[5]])})
    assert backend.run({"i": np.array([[1]])})["y"].tolist() == [[20.0]]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (helper.make_tensor_sequence_value_info("y", 1, ["b"]), "output 'y' is not a tensor"),
        (
            helper.make_tensor_value_info("y", TensorProto.FLOAT8E4M3FN, ["b"]),
            "output 'y' has the type FLOAT8E4M3FN, which cannot be served",
        ),
    ],
)
def test_an_interface_that_cannot_travel_is_refused(tmp_path: Path, output: onnx.ValueInfoProto, message: str) -> None:
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [], [output])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(ModelLoadError, match=message):
        OnnxRuntime().describe(tmp_path / "m.onnx")


def test_a_text_file_is_not_onnx(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("hello")
    with pytest.raises(ModelLoadError, match="m.onnx: is not .*ONNX"):
        OnnxRuntime().describe(tmp_path / "m.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="no graph in it"):
        OnnxRuntime().describe(tmp_path / "empty.onnx")


@pytest.mark.gpu
def test_cuda_computes_in_bf16(tmp_path: Path) -> None:
    if not device_count():
        pytest.skip("no CUDA device")
    bf16 = TensorProto.BFLOAT16
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [("x", bf16, ["batch", 1])], [("y", bf16, ["batch", 1])])
    backend = load_backend(path, DevicePlacement(require_gpu=True))
    assert (backend.provider, backend.precision) == ("CUDAExecutionProvider", "bf16")
    y = backend.run({"x": np.array([[1.5], [3e38]], backend.compute_dtype("x"))})["y"]
    assert y.dtype == ml_dtypes.bfloat16
    assert y.astype(np.float32).tolist() == [[3.0], [np.inf]]


@pytest.mark.gpu
def test_cuda_computes_in_fp16(tmp_path: Path) -> None:
    if not device_count():
        pytest.skip("no CUDA device")
    backend = load_backend(save_mlp(tmp_path / "m.onnx"), DevicePlacement(require_gpu=True))
    assert (backend.provider, backend.precision) == ("CUDAExecutionProvider", "fp16")
    assert backend.compute_dtype("x") == np.float16
    x = np.random.default_rng(2).standard_normal((7, 64)).astype(np.float16)
    np.testing.assert_allclose(backend.run({"x": x})["y"].astype(np.float32), expected_mlp(x), atol=8e-3)


def replays(path: Path, **how: Any) -> GraphReplays:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return GraphReplays(session, "cpu", 0, **how)


class MovingDriver:
    """Copies as CUDA's driver does, to buffers that are on the CPU here."""

    def copy_to_device(self, target: int, source: int, size: int, device_id: int) -> None:
        assert device_id == 0
        ctypes.memmove(target, source, size)

    copy_to_host = copy_to_device


def batch(rows: int, seed: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float16)}


@pytest.mark.parametrize("max_shapes", [0, 1, 32])
def test_replays_answer_as_the_session_does(tmp_path: Path, max_shapes: int) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    graphs, plain = replays(path, max_shapes=max_shapes), ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for seed, rows in enumerate([4, 4, 1, 4, 1, 1, 8]):
        feeds = batch(rows, seed)
        (answer,) = graphs.run(feeds)
        np.testing.assert_array_equal(answer, plain.run(None, feeds)[0], strict=True)


def test_the_driver_copies_as_the_runtime_does(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    copies = DriverCopies(cast("CudaDriver", MovingDriver()), 0)
    graphs, plain = replays(path, copies=copies), ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for seed, rows in enumerate([4, 4, 1, 4, 1]):
        feeds = batch(rows, seed)
        np.testing.assert_array_equal(graphs.run(feeds)[0], plain.run(None, feeds)[0], strict=True)


def test_an_answer_outlives_the_next_run_of_its_shape(tmp_path: Path) -> None:
    graphs = replays(save_unbatched(tmp_path / "m.onnx"))
    answers = [graphs.run({"x": np.full(3, value, np.float32)})[0] for value in (1, 2, 3)]
    assert [answer.tolist() for answer in answers] == [[2.0] * 3, [4.0] * 3, [6.0] * 3]


def test_an_input_need_not_be_contiguous(tmp_path: Path) -> None:
    graphs = replays(save_unbatched(tmp_path / "m.onnx"))
    every_other = np.arange(6, dtype=np.float32)[::2]
    for _ in range(2):
        assert graphs.run({"x": every_other})[0].tolist() == [0.0, 4.0, 8.0]


@pytest.mark.gpu
def test_cuda_replays_what_it_recorded(tmp_path: Path) -> None:
    if not device_count():
        pytest.skip("no CUDA device")
    path, config = save_mlp(tmp_path / "m.onnx"), ModelConfig()
    plain = load_backend(path, DevicePlacement(require_gpu=True), config)
    config.optimization.cuda.graphs = True
    graphs = load_backend(path, DevicePlacement(require_gpu=True), config)
    for seed, rows in enumerate([4, 4, 1, 4, 1, 1, 8]):
        np.testing.assert_allclose(graphs.run(batch(rows, seed))["y"], plain.run(batch(rows, seed))["y"], rtol=2e-3, atol=2e-3)
