"""Layers that cuDNN computes, over its emulation in cudnn.c; see scenes.py."""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton

from halfserve.export.half_types import HALF_TYPES
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime, OnnxRuntimeBackend
from halfserve.serve.backends.onnx_runtime.probe_child import ones
from halfserve.serve.backends.onnx_runtime.session import SessionOpener
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_repository import ModelRepository
from halfserve.serve.model_control.version_loading import VersionLoader
from tests.export.stored_models import parse
from tests.serve.cuda_emulator.conftest import DEVICES
from tests.serve.cuda_emulator.copying_model import log
from tests.serve.running_server import running_server

CONV = "y = Conv <pads = [1, 1, 1, 1]> (x, w)"
CONVS = 9
RECURRENT = "hidden_size = 3"
LAYERS = {
    "Conv": ("[n, 2, 6, 6]", CONV, (3, 2, 3, 3), (4, 3, 6, 6)),
    "ConvTranspose": ("[n, 2, 6, 6]", "y = ConvTranspose (x, w)", (2, 3, 3, 3), (4, 3, 8, 8)),
    "MaxPool": ("[n, 2, 6, 6]", "y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)", (1,), (4, 2, 3, 3)),
    "AveragePool": ("[n, 2, 6, 6]", "y = AveragePool <kernel_shape = [3, 3]> (x)", (1,), (4, 2, 4, 4)),
    "GlobalAveragePool": ("[n, 2, 6, 6]", "y = GlobalAveragePool (x)", (1,), (4, 2, 1, 1)),
    "GlobalMaxPool": ("[n, 2, 6, 6]", "y = GlobalMaxPool (x)", (1,), (4, 2, 1, 1)),
    "ReduceMax": ("[n, 2, 6, 6]", "y = ReduceMax <axes = [2, 3]> (x)", (1,), (4, 2, 1, 1)),
    "ReduceL2": ("[n, 2, 6, 6]", "y = ReduceL2 <axes = [3], keepdims = 0> (x)", (1,), (4, 2, 6)),
    "Einsum": ("[n, 2, 6, 6]", 'y = Einsum <equation = "abcd->ad"> (x)', (1,), (4, 6)),
    "LSTM": ("[n, 1, 2]", f"y = LSTM <{RECURRENT}> (x, w, r)", (1, 12, 2), (4, 1, 1, 3)),
    "GRU": ("[n, 1, 2]", f"y = GRU <{RECURRENT}, linear_before_reset = 1> (x, w, r)", (1, 9, 2), (4, 1, 1, 3)),
}


def model_of(layer: str, name: str, dtype: np.dtype[Any]) -> onnx.ModelProto:
    """A model of one layer, at opset 17."""
    shape, node, weight, answer = LAYERS[layer]
    weights = {"w": np.ones(weight, dtype), "r": np.ones((1, weight[1] if len(weight) > 1 else 1, 3), dtype)}
    used = {key: array for key, array in weights.items() if f", {key}" in node}
    model = parse(f"m ({name}{shape} x) => ({name}[{','.join('abcd'[: len(answer)])}] y) {{ {node} }}", opset=17, ir=8)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, key) for key, array in used.items())
    return model


def session_of(layer: str, name: str, dtype: np.dtype[Any]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    model = model_of(layer, name, dtype)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])


@pytest.mark.parametrize("name", ["float", "float16"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_cudnn_run(layer: str, name: str) -> None:
    dtype = np.dtype(np.float32) if name == "float" else HALF_TYPES["float16"].dtype
    session = session_of(layer, name, dtype)
    shape = [size if isinstance(size, int) else 4 for size in session.get_inputs()[0].shape]
    (answer,) = session.run(None, {"x": np.ones(shape, dtype)})
    assert (answer.shape, answer.dtype) == (LAYERS[layer][-1], dtype)


def report(repository: Path) -> None:
    """Print, as JSON, on which provider each layer is opened as a server opens it, or the reason of the refusal."""
    found = {}
    for layer in LAYERS:
        path = repository / f"{layer}.onnx"
        onnx.save(model_of(layer, "float", np.dtype(np.float32)), path)
        try:
            opened = SessionOpener(path=path, placement=DevicePlacement(require_gpu=True)).open()
            opened.session.run(None, {"x": ones(opened.session.get_inputs()[0])})
            found[layer] = opened.provider
        except ModelLoadError as error:
            found[layer] = str(error)
    sys.stdout.write(json.dumps(found))


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "halfserve.{key}" value {{ string_value: "{value}" }} }}'


def served(folder: Path, config: str = "", end: str = "y = Relu (t9)", groups: str = "instance_group { gpus: 0 }") -> Model:
    """A model of nine Convs, loaded as a server loads it, with at most 16 rows in a batch."""
    body = " ".join(f"t{number + 1} = {CONV.removeprefix('y = ').replace('x', f't{number}')}" for number in range(CONVS))
    text = f"m (float[n, 2, 6, 6] t0) => (float[n, 2, 6, 6] y) {{ {body} {end} }}"
    model = parse(text, opset=17, ir=8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 2, 3, 3), np.float32), "w"))
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    onnx.save(model, version / "model.onnx")
    (folder / "m" / "config.pbtxt").write_text(f"max_batch_size: 16 {groups} {config}")
    (files,) = ModelRepository(folder).find("m")
    loader = VersionLoader(runtime=OnnxRuntime(), placement=DevicePlacement(), defaults=Defaults(), warm_up_budget_s=60)
    return loader.ready(loader.loaded(files))


def plans_and_replays(model: Model, device: ctypes.CDLL) -> set[tuple[int, int]]:
    """Send requests of different rows one after the other, and return how many plans and replays each costs."""
    found = set()
    with running_server(lambda: [model]) as server, triton.InferenceServerClient(server.address) as client:
        log(device)
        for rows in (4, 4, 8, 8, 4, 8, 4, *range(1, 11), *range(16, 6, -1)):
            given = triton.InferInput("t0", [rows, 2, 6, 6], "FP32")
            given.set_data_from_numpy(np.ones((rows, 2, 6, 6), np.float32))
            result = client.infer("m", [given])
            assert result is not None
            answer = result.as_numpy("y")
            assert answer is not None
            assert answer.shape == (rows, 2, 6, 6)
            made = log(device)
            found.add((made.count("cuDNN execution plan"), made.count("replay")))
    return found


def test_ten_batch_sizes_in_turn_build_no_plan(tmp_path: Path, device: ctypes.CDLL) -> None:
    model = served(tmp_path)
    assert model.limits.padded_rows == (1, 2, 4, 8, 12, 16)
    assert plans_and_replays(model, device) == {(0, 1)}


def test_each_device_replays_its_own_recordings(tmp_path: Path, device: ctypes.CDLL) -> None:
    """ONNX Runtime sets no device in runs of sessions with CUDA graphs: kernels for another device's stream are refused."""
    model = served(tmp_path, groups="")
    assert len(model.backends) == DEVICES
    log(device)
    for backend in reversed(model.backends):
        for _ in range(2):  # this thread's recording, and its replay
            backend.run({"t0": np.ones((4, 2, 6, 6), np.float32)})
    made = [line for line in log(device) if "replay" in line]
    assert made == ["device 1: replay"] * 2 + ["replay"] * 2


@pytest.mark.parametrize(
    ("config", "end", "reason"),
    [
        (parameter("cuda_graphs", "off"), "y = Relu (t9)", ""),
        ("", "y = Tan (t9)", "it runs without CUDA graphs"),
    ],
    ids=["off", "cpu"],
)
def test_without_graphs_each_batch_size_has_a_session_that_shares_weights(
    tmp_path: Path, device: ctypes.CDLL, caplog: pytest.LogCaptureFixture, config: str, end: str, reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        model = served(tmp_path, config, end)
    weights = sum(f"copy of {2 * 2 * 3 * 3 * 4} bytes to the device" in line for line in log(device))
    assert "runs in a session for each batch size of 1, 4, 8, 16, which share 1 weights" in caplog.text
    assert reason in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO and reason and reason in record.message]
    assert 1 < weights <= 3, "one of the session with recordings, one of the first without, and the shared one"
    assert model.limits.padded_rows == (1, 4, 8, 16)
    assert plans_and_replays(model, device) == {(0, 0)}


def test_a_copy_that_is_loaded_again_has_its_recordings(tmp_path: Path, device: ctypes.CDLL) -> None:
    model = served(tmp_path)
    assert model.reload is not None
    backend = model.reload(0)
    log(device)
    for rows in (1, 2, 4, 8, 12, 16):
        backend.run({"t0": np.ones((rows, 2, 6, 6), np.float32)})
    made = log(device)
    assert (made.count("cuDNN execution plan"), made.count("replay")) == (0, 6)


@pytest.mark.parametrize(
    ("config", "padded", "graphs"),
    [
        ("dynamic_batching { preferred_batch_size: [ 6 ] }", (1, 2, 4, 6, 8, 12, 16), True),
        ("dynamic_batching { preferred_batch_size: [ 6, 16 ] }" + parameter("pad_to_preferred", "on"), (6, 16), True),
        (parameter("pad_to_preferred", "off"), (), False),
        ("", (1, 2, 4, 8, 12, 16), True),
    ],
    ids=["preferred", "padded", "off", "default"],
)
def test_configured_sizes_come_before_the_default_ones(
    tmp_path: Path, config: str, padded: tuple[int, ...], *, graphs: bool
) -> None:
    model = served(tmp_path, config)
    (backend,) = model.backends
    assert isinstance(backend, OnnxRuntimeBackend)
    assert model.limits.padded_rows == padded
    assert (backend._replays is not None) is graphs
    assert not backend._by_rows


def test_each_change_of_the_batch_builds_a_plan(device: ctypes.CDLL) -> None:
    session = session_of("Conv", "float", np.dtype(np.float32))
    built = []
    for rows in (4, 4, 8, 8, 4, 8, 4):
        log(device)
        session.run(None, {"x": np.ones((rows, 2, 6, 6), np.float32)})
        made = log(device)
        assert made.count("cuDNN execution") == 1
        built.append(made.count("cuDNN execution plan"))
    assert built == [1, 0, 1, 0, 1, 1, 1]
