"""The buffers behind CUDA graphs, on the CPU: there nothing is recorded, and all else is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime.cuda_graphs import GraphReplays
from serve.engine.backend import DevicePlacement
from serve.engine.cuda_driver import device_count
from serve.engine.tensors import Array
from tests.models import save_mlp, save_unbatched
from tests.serve.backends.loading import load_backend


def replays(path: Path, **limits: int) -> GraphReplays:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return GraphReplays(session, "cpu", 0, **limits)


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
