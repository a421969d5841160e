"""Both kinds of model file over the wire, asked by Triton's own client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

from serve.backends.runtimes import Runtimes
from serve.engine.backend import DevicePlacement
from serve.engine.config.model_config import Defaults
from serve.engine.model import Model
from serve.engine.repository.loaded_version import load_model
from serve.engine.repository.model_repository import find_models
from serve.engine.tensors import Array
from tests.serve.running_server import running_server

PLATFORMS = {"onnx": "onnxruntime_onnx", "torch": "torch_export"}


def load_all(folder: Path) -> list[Model]:
    runtimes, placement = Runtimes(trust_torch_archives=True), DevicePlacement(use_gpu=False, threads=1)
    return [load_model(files, runtimes, placement, Defaults()) for files in find_models(folder)]


@pytest.fixture(scope="module")
def clients(folders: dict[str, Path]) -> Iterator[dict[str, InferenceServerClient]]:
    with ExitStack() as stack:
        made = {}
        for kind, folder in folders.items():
            running = stack.enter_context(running_server(lambda folder=folder: load_all(folder)))  # type: ignore[misc]  # (a default binds it)
            made[kind] = stack.enter_context(InferenceServerClient(running.address))
        yield made


@pytest.fixture(params=PLATFORMS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(client: InferenceServerClient, model: str, datatype: str, x: Array, classes: int = 0) -> Array:
    tensor = InferInput("x", x.shape, datatype)
    tensor.set_data_from_numpy(x)
    result = client.infer(model, [tensor], outputs=[InferRequestedOutput("y", class_count=classes)])
    return np.asarray(result.as_numpy("y"))


def test_metadata_name_the_platform(clients: dict[str, InferenceServerClient], kind: str) -> None:
    for model in ("mlp", "twice_bf16"):
        assert clients[kind].get_model_metadata(model).platform == PLATFORMS[kind]
    config = clients[kind].get_model_config("twice_bf16").config
    assert config.parameters["halfserve.precision"].string_value == "fp32 (the bf16 model, upcast)"


def test_bf16_goes_in_and_comes_out(clients: dict[str, InferenceServerClient], kind: str) -> None:
    x = np.array([[1.0], [-2.5], [3e38], [np.nan]], ml_dtypes.bfloat16)
    y = ask(clients[kind], "twice_bf16", "BF16", x)
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), np.array([[2.0], [-5.0], [np.inf], [np.nan]], np.float32))


def test_bf16_outputs_are_classified_by_value(clients: dict[str, InferenceServerClient], kind: str) -> None:
    x = np.array([[-2.0]], ml_dtypes.bfloat16)
    best = ask(clients[kind], "twice_bf16", "BF16", x, classes=1)
    assert best.tolist() == [[b"-4.000000:0"]]


def test_fp16_rows_of_one_request_are_answered_together(clients: dict[str, InferenceServerClient], kind: str) -> None:
    x = np.arange(9, dtype=np.float16)[:, None]
    np.testing.assert_array_equal(ask(clients[kind], "twice", "FP16", x), x + x, strict=True)
