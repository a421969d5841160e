"""The server to read answers tritonclient as the real one does, and stays short enough to read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.examples.reading_copy import server as reading_copy
from halfserve.serve.engine.backend import BackendView
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.tensors import Array, Tensors
from tests.examples.running import run_example
from tests.models import mlp_weights, save_mlp

MOST_LINES = 500


@dataclass(frozen=True)
class Held(BackendView):
    """Computes a batch once it is allowed to, and keeps the number of its rows."""

    go_on: threading.Event
    begun: threading.Event
    rows: list[int]

    def run(self, inputs: Tensors) -> Tensors:
        self.rows.append(len(inputs["x"]))
        self.begun.set()
        assert self.go_on.wait(60)
        return self._backend.run(inputs)


@contextmanager
def served(path: Path, limits: BatchLimits) -> Iterator[tuple[triton.InferenceServerClient, Held]]:
    """Serve a model on a thread."""
    model = reading_copy.load(save_mlp(path / "mlp.onnx"))
    backend = Held(model.backend, threading.Event(), threading.Event(), [])
    ports: SimpleQueue[int] = SimpleQueue()
    ends: SimpleQueue[Callable[[], object]] = SimpleQueue()

    async def serve() -> None:
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.put(lambda: loop.call_soon_threadsafe(end.set))
        await reading_copy.serve(replace(model, backend=backend), limits, 0, end, ports.put)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, serve())
        try:
            with triton.InferenceServerClient(f"127.0.0.1:{ports.get(timeout=60)}") as client:
                yield client, backend
        finally:
            backend.go_on.set()
            ends.get(timeout=60)()
            done.result(60)


def tensor_of(x: Array) -> triton.InferInput:
    tensor = triton.InferInput("x", x.shape, triton.np_to_triton_dtype(x.dtype))
    tensor.set_data_from_numpy(x)
    return tensor


def ask(client: triton.InferenceServerClient, x: Array, timeout_s: float | None = None) -> Array:
    answer: Array = client.infer("mlp", [tensor_of(x)], client_timeout=timeout_s).as_numpy("y")
    return answer


def expected(x: Array) -> Array:
    first, second = (weights.astype(np.float32) for weights in mlp_weights())
    answer: Array = np.maximum(x.astype(np.float32) @ first, 0) @ second
    return answer


def rows_of(count: int) -> Array:
    return np.random.default_rng(count).standard_normal((count, 64)).astype(np.float16)


def test_requests_that_wait_share_a_batch_and_get_their_own_rows(tmp_path: Path) -> None:
    sizes = [1, 3, 2]
    answers: SimpleQueue[triton.InferResult] = SimpleQueue()
    with served(tmp_path, BatchLimits(max_rows=8)) as (client, backend), ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, client, rows_of(5))
        assert backend.begun.wait(60)
        for size in sizes:
            client.async_infer("mlp", [tensor_of(rows_of(size))], lambda result, error: answers.put(error or result))
        for _ in range(20):  # later calls of the same connection: those before are queued
            assert client.is_model_ready("mlp")
        backend.go_on.set()
        np.testing.assert_allclose(first.result(), expected(rows_of(5)), atol=2e-2)
        found = {len(y): y for y in (answers.get(timeout=60).as_numpy("y") for _ in sizes)}
    for size in sizes:
        np.testing.assert_allclose(found[size], expected(rows_of(size)), atol=2e-2)
    assert backend.rows[0] == 5
    assert sum(backend.rows[1:]) == sum(sizes)
    assert len(backend.rows) < 1 + len(sizes)


def test_a_request_whose_deadline_passes_in_the_queue_is_not_computed(tmp_path: Path) -> None:
    with served(tmp_path, BatchLimits(max_rows=8)) as (client, backend), ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, client, rows_of(1))
        assert backend.begun.wait(60)
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            ask(client, rows_of(2), timeout_s=0.2)
        backend.go_on.set()
        first.result()
        ask(client, rows_of(3))
    assert backend.rows == [1, 3]


def test_metadata_names_the_tensors(tmp_path: Path) -> None:
    with served(tmp_path, BatchLimits(max_rows=8)) as (client, _):
        metadata = client.get_model_metadata("mlp")
        assert client.is_server_ready()
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("x", "FP16", [-1, 64])]
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.outputs] == [("y", "FP16", [-1, 10])]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (np.ones((1, 63), np.float16), "expected [-1, 64]"),
        (np.ones((1, 64), np.float32), "has datatype 'FP32', expected 'FP16'"),
        (np.ones((0, 64), np.float16), "expected one number of at least 1"),
        (np.ones((9, 64), np.float16), "9 rows do not fit a batch of at most 8"),
    ],
)
def test_a_wrong_request_says_what_was_expected(tmp_path: Path, x: Array, text: str) -> None:
    with served(tmp_path, BatchLimits(max_rows=8)) as (client, _), pytest.raises(InferenceServerException) as caught:
        ask(client, x)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert text in caught.value.message()


def test_a_file_that_is_no_model_ends_it_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    done = run_example("reading_copy.server", "text.onnx", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_it_can_be_read_at_one_sitting() -> None:
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in Path(reading_copy.__file__).parent.glob("*.py"))
    assert lines <= MOST_LINES
