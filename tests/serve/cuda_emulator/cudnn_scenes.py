"""Layers that cuDNN computes, over its emulation in cudnn.c; see scenes.py."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from halfserve.export.half_types import HALF_TYPES
from halfserve.serve.backends.onnx_runtime.probe_child import ones
from halfserve.serve.backends.onnx_runtime.session import SessionOpener
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.errors import ModelLoadError
from tests.export.stored_models import parse
from tests.serve.cuda_emulator.copying_model import log

CONV = "y = Conv <pads = [1, 1, 1, 1]> (x, w)"
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
    """That model on the emulated device."""
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
