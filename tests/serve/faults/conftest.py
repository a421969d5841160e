from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halfserve import Client
from tests.models import save_counter, save_mlp, save_picky, save_text
from tests.serve.faults.server_process import Load, ServerProcess, run_faulty_server, under_load

ROW_MB = 16
SPAN_S = 1.0  # what one batch of "counter" may take


@pytest.fixture(scope="session")
def faulty_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("faults") / "models"
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    save_picky(repository / "picky" / "1" / "model.onnx")
    save_picky(repository / "fragile" / "1" / "model.onnx")
    save_counter(repository / "counter" / "1" / "model.onnx")
    bound = f'parameters {{ key: "halfserve.max_compute_s" value {{ string_value: "{SPAN_S}" }} }}'
    (repository / "counter" / "config.pbtxt").write_text(bound)
    save_hungry(repository / "hungry" / "1" / "model.onnx")
    (repository / "hungry" / "config.pbtxt").write_text(
        'max_batch_size: 32 parameters { key: "halfserve.warm_up" value { string_value: "off" } }'
    )
    with run_faulty_server(repository) as process:
        yield process


@pytest.fixture
def load(faulty_server: ServerProcess) -> Iterator[Load]:
    """Clients of the server that check every answer while the test injects faults."""
    with under_load([faulty_server.address]) as at_work:
        yield at_work
        at_work.wait_for_more()


@pytest.fixture
def client(faulty_server: ServerProcess) -> Iterator[Client]:
    with Client(faulty_server.address, timeout_s=60, retries=0) as one:
        yield one


def save_hungry(path: Path) -> Path:
    """x FP32 [batch, 1] -> y = x, by way of ROW_MB megabytes a row."""
    text = "(float[batch, 1] x) => (float[batch, 1] y) { many = Expand(x, wide)  y = ReduceMax<keepdims = 1>(many, last) }"
    return save_text(path, text, wide=np.array([1, ROW_MB * 2**18]), last=np.array([1]))
