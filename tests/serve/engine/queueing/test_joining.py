"""Models whose outputs' rows are not their inputs': nobody gets what was found for somebody else."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper

from serve.backends.onnx_runtime.backend import OnnxRuntime
from serve.control.warm_up import warm_up
from serve.engine.backend import Placement
from serve.engine.batches.batch import Answered, Failed, run_batch
from serve.engine.batches.memory_limit import MemoryLimit
from serve.engine.configuration.config import Defaults
from serve.engine.errors import OutOfMemoryError
from serve.engine.model import Model
from serve.engine.queueing.joining import Joining
from serve.engine.repository.loaded_version import LoadedVersion, load_version
from serve.engine.repository.model_repository import find_models
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors
from tests.models import save_mlp, save_model
from tests.serve.running_server import running_server

WAITS = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
TWO, NONE = [1.0, 1, 0, 0], [0.0, 0, 0, 0]


def save_detector(path: Path, rows: str = "n", found: str = "n") -> Path:
    """x FP32 [rows, 4] -> y INT64 [found, 2]: row and column of each element that is not 0."""
    nodes = [helper.make_node("NonZero", ["x"], ["z"]), helper.make_node("Transpose", ["z"], ["y"], perm=[1, 0])]
    return save_model(path, nodes, [("x", TensorProto.FLOAT, [rows, 4])], [("y", TensorProto.INT64, [found, 2])])


def loaded(root: Path, config: str = WAITS) -> LoadedVersion:
    (root / "m" / "config.pbtxt").write_text(config)
    (files,) = find_models(root)
    return load_version(files, OnnxRuntime(), Placement(use_gpu=False, threads=1), Defaults())


def request(row: list[float]) -> InferRequest:
    return InferRequest({"x": np.array([row], np.float32)}, ("y",), 1, (4,), None, lambda _: None)


def test_what_is_tried_out_shows_that_rows_are_not_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_detector(tmp_path / "m" / "1" / "model.onnx")
    version = loaded(tmp_path)
    assert version.joining is not None
    warm_up(version, 5.0)
    assert not version.joining.is_safe
    assert "m/1: output 'y' has shape [4, 2] for 1 rows; its requests are computed one by one from now on" in caplog.text
    assert len(caplog.records) == 1


def test_requests_that_may_not_be_joined_get_their_own(tmp_path: Path) -> None:
    save_detector(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    joining = Joining("m/1")
    run_batch(backend, [request(TWO)], joining=joining)
    results = run_batch(backend, [request(TWO), request(NONE), request([0, 0, 0, 1])], joining=joining)
    assert [result.answers[0]["y"].tolist() for result in results if isinstance(result, Answered)] == [
        [[0, 0], [0, 1]],
        [],
        [[0, 3]],
    ]


def test_what_a_batch_shows_when_it_is_halved_holds_for_the_rest_of_it(tmp_path: Path) -> None:
    """The last two found two things in two rows, which could be cut."""
    save_detector(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    rows = [TWO] * 4 + [[1.0, 0, 0, 1], NONE, TWO, TWO]
    results = run_batch(backend, [request(row) for row in rows], joining=Joining("m/1"))
    answers = [answer["y"].tolist() for result in results if isinstance(result, Answered) for answer in result.answers]
    assert answers == [[[0, column] for column in np.flatnonzero(row)] for row in rows]


def test_a_batch_leaves_nothing_for_the_collector(tmp_path: Path) -> None:
    save_detector(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    kept = weakref.ref(backend)
    gc.disable()
    try:
        run_batch(backend, [request(TWO)], joining=Joining("m/1"))
        del backend
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("known", [True, False])
def test_what_cannot_be_joined_is_not_filled_up(tmp_path: Path, known: bool) -> None:
    save_detector(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    joining = Joining("m/1")
    joining.is_safe = not known
    (result,) = run_batch(backend, [request(TWO)], padded_sizes=(4,), joining=joining)
    assert isinstance(result, Answered)
    assert result.answers[0]["y"].tolist() == [[0, 0], [0, 1]]
    assert not joining.is_safe


@pytest.mark.parametrize("limit", [1, None])
def test_what_was_computed_in_pieces_is_computed_anew(tmp_path: Path, limit: int | None) -> None:
    """Each piece counts its rows from 0."""
    save_detector(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    memory = MemoryLimit("m/1", clock=lambda: 0.0)
    memory._rows = limit
    rows = np.array([TWO, TWO], np.float32)
    asked = InferRequest({"x": rows}, ("y",), 2, (4,), None, lambda _: None)
    (result,) = run_batch(backend, [asked], memory=memory, joining=Joining("m/1"))
    assert isinstance(result, Answered)
    assert result.answers[0]["y"].tolist() == np.argwhere(rows).tolist()


def test_memory_that_does_not_hold_a_request_is_said_to_be_the_reason() -> None:
    class Full:
        provider = precision = "test"

        def compute_dtype(self, name: str) -> np.dtype[Any]:
            return np.dtype(np.float32)

        def give_up(self) -> None:
            """Nothing."""

        def run(self, inputs: Tensors) -> Tensors:
            raise MemoryError(f"{len(inputs['x'])} rows")

    joining = Joining("m/1")
    joining.is_safe = False
    (result,) = run_batch(Full(), [request(TWO)], memory=MemoryLimit("m/1"), joining=joining)
    assert isinstance(result, Failed)
    assert isinstance(result.error, OutOfMemoryError)


def test_a_model_whose_rows_are_rows_stays_as_it_is(tmp_path: Path) -> None:
    save_mlp(tmp_path / "m" / "1" / "model.onnx")
    version = loaded(tmp_path)
    warm_up(version, 5.0)
    assert version.joining is not None
    assert version.joining.is_safe


@pytest.mark.parametrize("found", ["n", "found", "unk__7"])
def test_two_clients_of_a_detector_get_their_own(tmp_path: Path, found: str) -> None:
    """Together they would have found two things in two rows, which could be cut."""
    save_detector(tmp_path / "m" / "1" / "model.onnx", found=found)

    def models() -> list[Model]:
        version = loaded(tmp_path)
        warm_up(version, 5.0)
        return [version.model()]

    answers: dict[str, list[list[int]]] = {}

    def ask(address: str, who: str, row: list[float]) -> None:
        with triton.InferenceServerClient(address) as client:
            x = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.array([row], np.float32))
            answers[who] = client.infer("m", [x]).as_numpy("y").tolist()

    with running_server(models) as server:
        threads = [
            threading.Thread(target=partial(ask, server.address, who, row)) for who, row in (("two", TWO), ("none", NONE))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == {"two": [[0, 0], [0, 1]], "none": []}


@pytest.mark.parametrize(("found", "size"), [("n", 32), ("unk__7", 32), ("found", 0)])
def test_dimensions_of_several_names_are_no_batch_unless_somebody_says_so(tmp_path: Path, found: str, size: int) -> None:
    save_detector(tmp_path / "m" / "1" / "model.onnx", found=found)
    assert loaded(tmp_path, "").config.max_batch_size == size
    assert loaded(tmp_path, "max_batch_size: 4").config.max_batch_size == 4
