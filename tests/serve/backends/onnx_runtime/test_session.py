from __future__ import annotations

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from serve.backends.onnx_runtime import session as onnxruntime_session
from serve.engine.backend import DevicePlacement
from serve.engine.cuda_driver import device_count
from serve.engine.errors import ModelLoadError
from tests.models import save_mlp, save_unbatched
from tests.serve.backends.loading import open_session

ON_CPU = DevicePlacement(use_gpu=False, threads=1)


@pytest.fixture
def unusable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that the driver offers and whose libraries the runtime does not find."""
    if device_count():
        pytest.skip("this machine's GPU can be used")
    monkeypatch.setattr(onnxruntime_session, "device_count", lambda: 1)


def answer(session: onnxruntime_session.OpenSession) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(
        session.session.run(None, {next(iter(session.given_names.values()), "x"): np.ones((1, 64), np.float16)})[0]
    )


def test_an_fp32_model_stays_as_it_is(tmp_path: Path) -> None:
    opened = open_session(save_unbatched(tmp_path / "m.onnx"), ON_CPU)
    assert (opened.provider, opened.precision) == ("CPUExecutionProvider", "fp32")


def test_an_fp16_model_is_upcast_on_the_cpu(tmp_path: Path) -> None:
    opened = open_session(save_mlp(tmp_path / "m.onnx"), ON_CPU)
    assert (opened.provider, opened.precision) == ("CPUExecutionProvider", "fp32 (the fp16 model, upcast)")


def test_without_a_device_the_cpu_is_used_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime_session, "device_count", lambda: 0)
    assert open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement()).provider == "CPUExecutionProvider"
    assert caplog.text == ""


def test_a_required_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_session, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match=r"a GPU is required, but CUDA device 1 is not there \(1 found"):
        open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement(require_gpu=True, device_id=1))


@pytest.mark.usefixtures("unusable_gpu")
def test_a_device_that_cannot_be_used_is_named_and_the_model_upcast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    with caplog.at_level(logging.WARNING):
        opened = open_session(path, DevicePlacement(threads=1))
    assert (opened.provider, opened.precision) == ("CPUExecutionProvider", "fp32 (the fp16 model, upcast)")
    np.testing.assert_array_equal(answer(opened), answer(open_session(path, ON_CPU)))
    assert "ONNX Runtime cannot use CUDA device 0" in caplog.text
    assert "pip install 'halfserve[cuda]'" in caplog.text
    assert capfd.readouterr() == ("", ""), "the runtime's own lines stay out of the ready line"


@pytest.mark.usefixtures("unusable_gpu")
def test_two_that_load_at_once_leave_stdout_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stdout = save_mlp(tmp_path / "m.onnx"), sys.stdout
    two_are_in, one_is_out = threading.Event(), threading.Event()
    entered: list[int] = []

    def preload() -> None:
        entered.append(threading.get_ident())
        if len(entered) == 1:
            two_are_in.wait(0.2)
        else:
            two_are_in.set()
            one_is_out.wait(5)

    def load() -> None:
        onnxruntime_session._preload_cuda()
        open_session(path, ON_CPU)
        one_is_out.set()

    monkeypatch.setattr(ort, "preload_dlls", preload)
    onnxruntime_session._preloaded.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(load)
    onnxruntime_session._preloaded.cache_clear()
    assert sys.stdout is stdout


@pytest.mark.usefixtures("unusable_gpu")
def test_a_required_device_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="a GPU is required, but ONNX Runtime cannot use CUDA device 0"):
        open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement(require_gpu=True))


def test_weights_in_a_file_beside_the_model_are_found(tmp_path: Path) -> None:
    model = onnx.load(save_mlp(tmp_path / "whole.onnx"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    whole, split = (answer(open_session(tmp_path / name, ON_CPU)) for name in ("whole.onnx", "m.onnx"))
    np.testing.assert_array_equal(whole, split)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelLoadError, match="weights.bin"):
        open_session(tmp_path / "m.onnx", ON_CPU)


def test_a_model_that_the_runtime_refuses_is_a_load_error(tmp_path: Path) -> None:
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], domain="nowhere")
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", 1, ["b"])], [value("y", 1, ["b"])])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("nowhere", 1)]), path)
    with pytest.raises(ModelLoadError, match="m.onnx: ONNX Runtime refuses the model: ") as refused:
        open_session(path, ON_CPU)
    assert "\n" not in str(refused.value)


@pytest.mark.gpu
def test_cuda_runs_the_fp16_model_as_it_is(tmp_path: Path) -> None:
    if not device_count():
        pytest.skip("no CUDA device")
    opened = open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement(require_gpu=True))
    assert (opened.provider, opened.precision) == ("CUDAExecutionProvider", "fp16")
