"""Half-precision attention with a dynamic batch, which ends the process in ONNX Runtime 1.31 when it is loaded as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from export import export_onnx, to_half
from serve.backends.onnx_runtime.backend import OnnxRuntime
from serve.engine.backend import DevicePlacement
from tests.serve.backends.loading import load_backend


def test_it_is_served_on_the_cpu_with_the_fp32_models_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    path, samples = tmp_path / "model.onnx", torch.randn(3, 8, 32)
    export_onnx(to_half(model).module, [samples.half()], path, output_names=["y"])
    backend = load_backend(path, DevicePlacement(use_gpu=False, threads=1))
    (name,) = (spec.name for spec in OnnxRuntime().describe(path).inputs)
    with torch.no_grad():
        expected = model(samples).numpy()
    answer = backend.run({name: samples.half().numpy()})["y"]
    assert answer.dtype == np.float16
    np.testing.assert_allclose(answer.astype(np.float32), expected, atol=0.01)
