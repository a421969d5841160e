"""Faults of the emulated devices, and what a recording or a copy prohibits; see scenes.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

from halfserve.serve.backends.onnx_runtime.cuda import GraphReplays
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntimeBackend
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.cuda_driver import CudaDriver, CudaError
from halfserve.serve.engine.errors import BackendError, InstanceLostError, is_device_lost
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.execution.memory_limit import MemoryLimit
from halfserve.serve.engine.results import Answered
from tests.export.stored_models import parse
from tests.serve.backends.support import load_backend
from tests.serve.cuda_emulator.copying_model import COLUMNS, check, load, log, rows, with_graphs
from tests.serve.cuda_emulator.memory_scenes import requests

LOST = [999, 46, 721, 709, 700]
BODIES = {
    "copies": "y = Identity (x)",
    "cuBLAS": "y = MatMul (x, w)",
    "cuDNN": "t = Reshape (x, image) \n c = Conv (t, kernel) \n y = Reshape (c, back)",
}
# What each model reports of a fault before it; a code of CUDA where copies see it first.
REPORTED = {
    "copies": "CUDA failure {code}: ",
    "cuBLAS": "CUBLAS failure 13: the function failed to launch on the GPU",
    "cuDNN": "CUDNN",
}


def computing(path: Path, body: str, device_id: int = 0) -> OnnxRuntimeBackend:
    """A model of BODIES on a device."""
    model = parse(f"g (float[n, {COLUMNS}] x) => (float[n, {COLUMNS}] y) {{ {BODIES[body]} }}", opset=17, ir=8)
    shapes = {"image": np.array([-1, 1, 2, 2]), "back": np.array([-1, COLUMNS])}
    weights = {"w": np.ones((COLUMNS, COLUMNS), np.float32), "kernel": np.ones((1, 1, 1, 1), np.float32), **shapes}
    used = {name: array for name, array in weights.items() if f", {name})" in BODIES[body]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in used.items())
    onnx.save(model, path)
    return load_backend(path, DevicePlacement(device_id=device_id))


@pytest.mark.parametrize("code", LOST)
@pytest.mark.parametrize("body", BODIES)
def test_a_fault_that_a_later_call_sees_loses_the_device(tmp_path: Path, device: ctypes.CDLL, body: str, code: int) -> None:
    backend = computing(tmp_path / "m.onnx", body)
    backend.run(rows(2))
    device.emulated_fault(0, code)
    with pytest.raises(BackendError) as lost:
        backend.run(rows(2))
    assert REPORTED[body].format(code=code) in str(lost.value)
    assert isinstance(lost.value.__cause__, InstanceLostError)
    with pytest.raises(InstanceLostError):
        run_batch(backend, requests(2, 4))


@pytest.mark.parametrize("status", [13, 14])
def test_an_error_of_cublas_alone_fails_its_batch_alone(tmp_path: Path, device: ctypes.CDLL, status: int) -> None:
    backend = computing(tmp_path / "m.onnx", "cuBLAS")
    device.emulated_blas(status, 1)
    with pytest.raises(BackendError, match=f"CUBLAS failure {status}") as failed:
        backend.run(rows(2))
    assert not is_device_lost(failed.value)
    backend.run(rows(2))


def no_memory_for_cublas(device: ctypes.CDLL) -> None:
    device.emulated_blas(3, 1)


def no_memory_for_the_batch(device: ctypes.CDLL) -> None:
    device.emulated_memory(0, device.emulated_used(0) + (3 << 20))


@pytest.mark.parametrize("lack", [no_memory_for_cublas, no_memory_for_the_batch])
def test_a_batch_without_memory_is_halved(tmp_path: Path, device: ctypes.CDLL, lack: Callable[[ctypes.CDLL], None]) -> None:
    backend, memory = computing(tmp_path / "m.onnx", "cuBLAS"), MemoryLimit("m/1 instance 0")
    backend.run(rows(2))
    lack(device)
    (answered,) = run_batch(backend, requests(2, 1 << 16), memory=memory)
    assert isinstance(answered, Answered)
    assert memory.rows in {1 << 16, 1 << 15}


def test_copies_of_locked_memory_go_on_beside_their_thread(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load(tmp_path / "m.onnx")
    with ThreadPoolExecutor(1) as worker:
        for blocks in (1, 0):  # the first batch shows where the model runs; then its memory is locked
            device.emulated_copy_rate(ctypes.c_double(1e9))
            (answered,) = worker.submit(run_batch, backend, requests(2, 4096)).result()
            assert isinstance(answered, Answered)
            sent_ns = 2 * 4096 * COLUMNS * 4
            came_back_ns = sent_ns  # into ONNX Runtime's own memory, which is pageable
            assert device.emulated_copied_ns(1) == came_back_ns + sent_ns * blocks
            assert device.emulated_copied_ns(0) == sent_ns * (1 - blocks)


def test_pageable_memory_is_not_recorded(tmp_path: Path, device: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    backend = load(tmp_path / "m.onnx", with_graphs())
    replays = GraphReplays(backend._session, "cpu", 0)
    for start in range(3):
        assert replays.run(rows(2, start))[0].ravel().tolist() == list(range(start, start + 2 * COLUMNS))
    assert "pageable copy: refused, as its stream records" in log(device)
    assert caplog.text.count("a CUDA graph could not be recorded (CUDA failure 90") == 1


def test_the_legacy_stream_beside_a_recording_is_no_lost_device(device: ctypes.CDLL) -> None:
    driver, stream, graph = CudaDriver(device), ctypes.c_void_p(), ctypes.c_void_p()
    device.cudaStreamCreate(ctypes.byref(stream))  # a blocking one, for which the legacy stream would have to wait
    device.cudaStreamBeginCapture(stream, 0)
    with ThreadPoolExecutor(1) as other:
        driver.settle_thread(0)
        with pytest.raises(CudaError, match=r"capturing blocking stream \(CUDA error 906\)"):
            other.submit(driver.call_within, driver._context(0), "cuStreamSynchronize", None).result()
        assert not other.submit(driver.is_lost, 0).result()
    assert device.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 901
    assert not driver.is_lost(0)
    device.cudaStreamDestroy(stream)


def test_a_fault_of_a_replay_loses_the_device(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load(tmp_path / "m.onnx", with_graphs())
    for start in range(3):
        check(backend, 2, start)
    assert log(device).count("replay") == 2
    device.emulated_fault(0, 700)
    with pytest.raises(BackendError, match="CUDA failure 700") as lost:
        backend.run(rows(2))
    assert isinstance(lost.value.__cause__, InstanceLostError)
