"""What ONNX Runtime's CUDA provider does on the emulated device. test_on_emulated_device.py runs it in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.cuda import FIRST_WAIT, RECORDING_LOCK
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime, OnnxRuntimeBackend
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.errors import BackendError, ModelLoadError, is_device_lost, is_out_of_memory
from halfserve.serve.engine.precision_guard.loading import make_guard
from tests.export.stored_models import parse
from tests.serve.backends.support import load_backend
from tests.serve.cuda_emulator.copying_model import COLUMNS, check, load, log, rows, save, with_graphs, with_options
from tests.serve.cuda_emulator.library import PROVIDER

OUT_OF_MEMORY, ILLEGAL_ADDRESS, OLD_DRIVER = 2, 700, 35
BROKEN = "CUDA failure 901: operation failed due to a previous error during capture"


def test_answers_are_those_of_the_request_at_hand(tmp_path: Path, device: ctypes.CDLL) -> None:
    plain, graphs = load(tmp_path / "p.onnx"), load(tmp_path / "g.onnx", with_graphs())
    assert plain.provider == graphs.provider == "CUDAExecutionProvider"
    for turn, count in enumerate([2, 3, 2, 3, 2, 3, 1]):
        for backend in (plain, graphs):
            check(backend, count, 100 * turn)
    assert log(device).count("replay") == 4


def test_the_providers_own_switch_records_as_ours_does(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load(tmp_path / "m.onnx", with_options(enable_cuda_graph="1"))
    for start in range(4):
        check(backend, 2, start)
    assert log(device).count("replay") == 3


def test_an_input_that_is_read_on_the_cpu_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = load(tmp_path / "m.onnx", with_graphs(), sized=True)
    for shape in ([2, 2], [4, 1], [1, 4], [2, 2]):
        answer = backend.run({"x": np.arange(4, dtype=np.float32), "s": np.array(shape)})["y"]
        assert (list(answer.shape), answer.ravel().tolist()) == (shape, [0, 1, 2, 3])
    assert "m.onnx: input 's' is read on the CPU, which CUDA graphs would not do for each batch" in caplog.text


@pytest.mark.parametrize(("name", "reason"), [("x", "is an input"), ("n", "is made on the CPU")])
def test_an_output_that_no_node_makes_on_the_device_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, reason: str
) -> None:
    model = onnx.load(save(tmp_path / "m.onnx"))
    if name == "n":
        model.graph.node.append(helper.make_node("Shape", ["x"], ["n"]))
    value = helper.make_tensor_value_info
    made = value("n", TensorProto.INT64, [2]) if name == "n" else value("x", TensorProto.FLOAT, ["n", COLUMNS])
    model.graph.output.append(made)
    onnx.save(model, tmp_path / "m.onnx")
    backend = load_backend(tmp_path / "m.onnx", DevicePlacement(), with_graphs())
    for start, count in enumerate([2, 2, 3, 3, 3, 2, 2]):
        feeds = rows(count, start)
        expected = [count, COLUMNS] if name == "n" else feeds["x"].ravel().tolist()
        assert backend.run(feeds)[name].ravel().tolist() == expected
    assert f"m.onnx: output '{name}' {reason}, which CUDA graphs would not do for each batch" in caplog.text


@pytest.mark.parametrize(("operator", "reason"), [("RandomUniformLike", "draws numbers"), ("NonZero", "waits for the device")])
def test_a_model_that_no_recording_can_follow_is_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, operator: str, reason: str
) -> None:
    model = onnx.load(save(tmp_path / "m.onnx"))
    model.graph.node.append(helper.make_node(operator, ["x"], ["r"]))
    kind = TensorProto.INT64 if operator == "NonZero" else TensorProto.FLOAT
    model.graph.output.append(helper.make_tensor_value_info("r", kind, ["k", "m"]))
    onnx.save(model, tmp_path / "m.onnx")
    backend = load_backend(tmp_path / "m.onnx", DevicePlacement(), with_graphs())
    assert backend._replays is None
    assert f"m.onnx: {operator} {reason}, which CUDA graphs would not do for each batch" in caplog.text


def test_a_batch_that_cannot_be_recorded_is_computed_and_recorded_later(
    tmp_path: Path, device: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    backend = load(tmp_path / "m.onnx", with_graphs())
    check(backend, 2)
    device.emulated_break()
    for start in range(1 + FIRST_WAIT):
        check(backend, 2, start)
    assert log(device).count("replay") == 0
    for _ in range(3):
        check(backend, 3)
    assert log(device).count("replay") == 2, "other sizes do not wait"
    device.emulated_break()
    for start in range(2):
        check(backend, 2, start)
    for start in range(2 * FIRST_WAIT):
        check(backend, 2, start)
    assert log(device).count("replay") == 0
    for start in range(4):
        check(backend, 2, start)
    assert log(device).count("replay") == 3
    assert [record.message for record in caplog.records] == [
        f"a CUDA graph could not be recorded ({BROKEN}); the next {wait} batches of its size are computed without one, and "
        "then it is tried again"
        for wait in (FIRST_WAIT, 2 * FIRST_WAIT)
    ]


def test_a_batch_is_answered_where_there_is_no_memory_to_record(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load(tmp_path / "m.onnx", with_graphs())
    check(backend, 2_000_000)
    device.emulated_limit(
        1 << 20
    )  # what the session holds is enough for the next ones, and buffers of their own are not to be had
    try:
        for start in range(3):
            check(backend, 1_900_000, start)
    finally:
        device.emulated_limit(2**63)


def test_each_thread_records_for_itself(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load(tmp_path / "m.onnx", with_graphs())
    with ThreadPoolExecutor(1) as warm_up:
        for start in range(3):
            warm_up.submit(check, backend, 2, start).result()
    with RECORDING_LOCK.opening():  # a recording of this thread would have to wait
        check(backend, 2, 50)
    assert [line for line in log(device) if "capture" in line] == ["capture begins", "capture ends"]
    check(backend, 2, 60)
    assert [line for line in log(device) if "capture" in line] == ["capture begins", "capture ends"]


class Recording:
    """A batch on another thread that records, and is held in the middle of it."""

    def __init__(self, path: Path, device: ctypes.CDLL) -> None:
        self._backend = load(path, with_graphs())
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(check, self._backend, 2).result()
        device.emulated_hold()
        self._done = self._pool.submit(check, self._backend, 2, 7)
        device.emulated_wait_until_held()
        self._device = device

    def end(self) -> None:
        """It goes on, and answers."""
        self._device.emulated_go_on()
        self._done.result()
        self._pool.shutdown()
        assert log(self._device).count("capture ends, broken") == 0


def test_a_model_runs_beside_a_recording(tmp_path: Path, device: ctypes.CDLL) -> None:
    other = load(tmp_path / "o.onnx")
    recording = Recording(tmp_path / "m.onnx", device)
    check(other, 100_000)  # for which the device's memory is allocated
    recording.end()


def test_a_model_is_loaded_after_a_recording(tmp_path: Path, device: ctypes.CDLL) -> None:
    recording = Recording(tmp_path / "m.onnx", device)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, tmp_path / "o.onnx")
        with pytest.raises(TimeoutError):
            loading.result(timeout=0.3)
        recording.end()
        check(loading.result(), 2)


def test_a_model_with_recordings_is_unloaded_beside_a_recording(tmp_path: Path, device: ctypes.CDLL) -> None:
    gone = [load(tmp_path / "o.onnx", with_graphs())]
    for _ in range(2):
        check(gone[0], 2)
    recording = Recording(tmp_path / "m.onnx", device)
    thread = threading.Thread(target=gone.clear)  # one that has never used the device
    thread.start()
    thread.join()
    assert "cudaGraphExecDestroy" in log(device)
    recording.end()


def test_nothing_is_recorded_while_a_model_is_loaded(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load(tmp_path / "m.onnx", with_graphs())
    check(backend, 2)
    with RECORDING_LOCK.opening():
        check(backend, 2, 1)
    assert "capture begins" not in log(device)
    check(backend, 2, 2)
    assert "capture begins" in log(device)


@pytest.mark.parametrize("require_gpu", [False, True])
def test_a_lost_device_is_told_and_ends_nothing(
    tmp_path: Path, device: ctypes.CDLL, caplog: pytest.LogCaptureFixture, *, require_gpu: bool
) -> None:
    backends = [load(tmp_path / "p.onnx"), load(tmp_path / "g.onnx", with_graphs())]
    for backend in backends * 2:
        check(backend, 2)
    device.emulated_fail(ILLEGAL_ADDRESS)
    for backend in backends:
        with pytest.raises(BackendError, match=r"request: CUDA failure 700: an illegal memory access was encountered$") as lost:
            backend.run(rows(2))
        assert is_device_lost(lost.value)
    for config in (ModelConfig(), with_graphs()):
        with pytest.raises(ModelLoadError, match=r"illegal memory access was encountered$") as refused:
            load_backend(tmp_path / "p.onnx", DevicePlacement(require_gpu=require_gpu), config)
        assert is_device_lost(refused.value)
    assert "without CUDA graphs" not in caplog.text
    del backend
    backends.clear()
    gc.collect()


@pytest.mark.parametrize("code", [999, 46, 721, 709, 13])
def test_a_lost_device_is_recognised_by_asking_it(tmp_path: Path, device: ctypes.CDLL, code: int) -> None:
    backend = load(tmp_path / "m.onnx")
    check(backend, 2)
    device.emulated_fail(code)
    with pytest.raises(BackendError, match=f"CUDA failure {code}: emulated error") as lost:
        backend.run(rows(2))
    assert is_device_lost(lost.value)
    assert not is_device_lost(RuntimeError(str(lost.value))), "its text does not say so"
    del backend
    gc.collect()


def test_too_little_memory_is_no_lost_device(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load(tmp_path / "m.onnx")
    check(backend, 2)
    device.emulated_fail(OUT_OF_MEMORY)
    with pytest.raises(BackendError, match="out of memory") as failed:
        backend.run(rows(2))
    assert is_out_of_memory(failed.value)
    assert not is_device_lost(failed.value)


def test_why_a_device_cannot_be_used_is_told(
    tmp_path: Path, device: ctypes.CDLL, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    device.emulated_fail(OLD_DRIVER)
    assert load(tmp_path / "m.onnx").provider == "CPUExecutionProvider"
    reason = "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version"
    assert f"m.onnx: ONNX Runtime cannot use CUDA device 0 ({reason}); it runs on the CPU" in caplog.text
    with pytest.raises(ModelLoadError, match=f"a GPU is required, but .*{reason}"):
        load_backend(tmp_path / "m.onnx", DevicePlacement(require_gpu=True))
    assert capfd.readouterr().out == ""


def test_a_node_without_a_kernel_is_named_with_the_command_that_converts_again(tmp_path: Path) -> None:
    pool = parse("g (bfloat16[n, 2, 4, 4] x) => (bfloat16[n, 2, 1, 1] pooled) { pooled = GlobalMaxPool (x) }", opset=22, ir=10)
    onnx.save(pool, tmp_path / "m.onnx")
    with pytest.raises(ModelLoadError) as refused:
        load_backend(tmp_path / "m.onnx", DevicePlacement())
    assert str(refused.value).startswith(
        f"{tmp_path}/m.onnx: ONNX Runtime refuses the model: node 'pooled': neither its CUDA provider nor its CPU provider has "
        "a GlobalMaxPool kernel for the node's types, such as bfloat16; convert the float32 model again, with "
        "`halfserve convert SOURCE TARGET --dtype bfloat16 --target any`"
    )


def test_without_tensorrt_the_model_runs_on_its_cuda_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig()
    config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="tensorrt")
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator.add(name="cuda")
    accelerator.parameters["gpu_mem_limit"] = "123456789"
    backend = load(tmp_path / "m.onnx", config)
    assert backend.provider == "CUDAExecutionProvider"
    assert backend._session.get_provider_options()["CUDAExecutionProvider"]["gpu_mem_limit"] == "123456789"
    assert "m.onnx: ONNX Runtime cannot use TensorRT (Please install TensorRT libraries" in caplog.text
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
    with pytest.raises(ModelLoadError, match=f"m.onnx: ONNX Runtime refuses the model: {reason}"):
        load(tmp_path / "m.onnx", with_options(**{option: text}))
    assert capfd.readouterr().out == ""


# A product or a convolution in one type, and what the provider is to do with TF32: without it, 1.31 computes half-precision
# convolutions without tensor cores.
PRODUCTS = {
    "float32 products": ("float[n,4] x) => (float[n,4] y) { y = MatMul(x, w) }", (4, 4), "0", "fp32"),
    "a float32 convolution": ("float[n,4,1,1] x) => (float[n,4,1,1] y) { y = Conv(x, w) }", (4, 4, 1, 1), "0", "fp32"),
    "half products": ("float16[n,4] x) => (float16[n,4] y) { y = MatMul(x, h) }", (4, 4), "0", "fp16"),
    "a half convolution": ("float16[n,4,1,1] x) => (float16[n,4,1,1] y) { y = Conv(x, h) }", (4, 4, 1, 1), "1", "fp16"),
    "a convolution behind a cast": (
        "float[n,4,1,1] x) => (float[n,4,1,1] y) { c = Cast<to=10>(x)  v = Relu(c)  z = Conv(v, h)  y = Cast<to=1>(z) }",
        (4, 4, 1, 1),
        "1",
        "fp16",
    ),
}


def product(path: Path, name: str, config: ModelConfig | None = None) -> OnnxRuntimeBackend:
    text, shape, _, _ = PRODUCTS[name]
    weights: dict[str, Any] = {"w": np.ones(shape, np.float32)} if "w)" in text else {"h": np.ones(shape, np.float16)}
    onnx.save(parse(f"g ({text}", opset=17, ir=8, **weights), path)
    return load_backend(path, DevicePlacement(), config)


def tf32_of(backend: OnnxRuntimeBackend) -> str:
    return str(backend._session.get_provider_options()["CUDAExecutionProvider"]["use_tf32"])


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.usefixtures("device")
def test_float32_products_are_tf32_beside_a_half_convolution_alone(tmp_path: Path, name: str) -> None:
    backend = product(tmp_path / "m.onnx", name)
    assert (tf32_of(backend), backend.precision) == PRODUCTS[name][2:]


@pytest.mark.usefixtures("device")
def test_the_precision_says_that_a_configuration_asks_for_tf32_and_the_twin_has_none(tmp_path: Path) -> None:
    config = with_options(use_tf32="1")
    config.parameters["halfserve.precision_guard"].string_value = "fallback"
    model, runtime = tmp_path / "m.onnx", OnnxRuntime()
    (tmp_path / "fp32").mkdir()
    product(tmp_path / "fp32" / "model.onnx", "float32 products")
    backend = product(model, "float32 products", config)
    assert (tf32_of(backend), backend.precision) == ("1", "fp32 (TF32 products)")
    guard = make_guard(
        model, runtime, DevicePlacement(), label="m", interface=runtime.describe(model), config=config, source=model
    )
    assert guard is not None
    assert guard._fallback is not None
    twin = guard._fallback._twin._loaded()
    assert isinstance(twin, OnnxRuntimeBackend)
    assert (tf32_of(twin), twin.precision) == ("0", "fp32")


@pytest.mark.usefixtures("device")
def test_long_half_precision_sums_are_added_in_float32(tmp_path: Path) -> None:
    product(tmp_path / "m.onnx", "half products")
    assert b"ORT_CUDA_GEMM_OPTIONS" in PROVIDER.read_bytes()
    assert os.environ["ORT_CUDA_GEMM_OPTIONS"] == "2"
