"""The first requests that meet, of a model that nobody has looked at, get what each gets alone; ordinary models batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from serve.engine.backend import Backend
from serve.engine.batches.batch import Answered, Failed, run_batch
from serve.engine.device_faults import InstanceLostError
from serve.engine.errors import BackendError
from serve.engine.queueing.joining import Joining
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors
from tests.models import save_mlp, save_model, save_picky
from tests.serve.engine.queueing.test_joining import loaded, request

ROWS = [[1.0, 2, 3, 4], [-5.0, 0, 0, 7], [0.5, 9, 1, 1]]


def in_doubt() -> Joining:
    joining = Joining("m/1")
    joining.is_doubtful = True
    return joining


def softmax_over_rows(root: Path) -> Backend:
    nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
    rows: list[int | str] = ["n", 4]
    save_model(root / "m" / "1" / "model.onnx", nodes, [("x", TensorProto.FLOAT, rows)], [("y", TensorProto.FLOAT, rows)])
    (backend,) = loaded(root).backends
    return backend


def batches(results: list[Answered | Failed]) -> list[int]:
    return [len(result.requests) for result in results if isinstance(result, Answered)]


def test_rows_that_depend_on_each_other_are_never_answered_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend, joining = softmax_over_rows(tmp_path), in_doubt()
    for _ in range(3):
        results = run_batch(backend, [request(row) for row in ROWS], joining=joining)
        assert [result.answers[0]["y"].tolist() for result in results if isinstance(result, Answered)] == [[[1.0] * 4]] * 3
    assert not joining.is_safe
    (message,) = caplog.messages
    assert message.startswith(
        "m/1: output 'y' of a row depends on the other rows of its batch; its requests are computed one by"
    )


def test_nor_are_they_filled_up(tmp_path: Path) -> None:
    requests = [request(row) for row in ROWS]
    results = run_batch(softmax_over_rows(tmp_path), requests, padded_sizes=(8,), joining=in_doubt())
    assert [result.answers[0]["y"].tolist() for result in results if isinstance(result, Answered)] == [[[1.0] * 4]] * 3


def test_nor_are_rows_that_are_all_the_same(tmp_path: Path) -> None:
    results = run_batch(softmax_over_rows(tmp_path), [request(ROWS[0])] * 2, joining=in_doubt())
    assert [result.answers[0]["y"].tolist() for result in results if isinstance(result, Answered)] == [[[1.0] * 4]] * 2


def test_an_ordinary_model_is_looked_at_once(tmp_path: Path) -> None:
    save_mlp(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    joining, counted = in_doubt(), _Counted(backend)
    requests = [request([float(column) for column in range(64)]), request([0.0] * 64)]
    assert batches(run_batch(counted, requests, joining=joining)) == [2]
    assert batches(run_batch(counted, requests, joining=joining)) == [2]
    assert counted.rows == [1, 1, 2, 2, 2]
    assert not joining.is_doubtful


def test_rows_that_are_all_the_same_share_and_leave_the_doubt(tmp_path: Path) -> None:
    save_mlp(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    joining, counted = in_doubt(), _Counted(backend)
    for _ in range(2):
        assert batches(run_batch(counted, [request([0.0] * 64) for _ in range(3)], joining=joining)) == [3]
    assert counted.rows == [1, 1, 2, 3, 3]
    assert joining.is_doubtful


def test_a_request_that_fails_leaves_the_doubt_and_the_others_their_answers(tmp_path: Path) -> None:
    save_picky(tmp_path / "m" / "1" / "model.onnx")
    (backend,) = loaded(tmp_path).backends
    joining = in_doubt()
    rows = [InferRequest({"i": np.array([[i]])}, ("y",), 1, (1,), None, lambda _: None) for i in (99, 0, 1)]
    bad, *good = run_batch(backend, rows, joining=joining)
    assert isinstance(bad, Failed)
    assert [result.answers[0]["y"].tolist() for result in good if isinstance(result, Answered)] == [[[10.0]], [[20.0]]]
    assert joining.is_doubtful
    assert joining.is_safe


def test_a_device_that_is_lost_in_a_look_is_not_asked_again(tmp_path: Path) -> None:
    backend = _Counted(softmax_over_rows(tmp_path), fails=BackendError("CUDA failure 719: unspecified launch failure"))
    with pytest.raises(InstanceLostError):
        run_batch(backend, [request(row) for row in ROWS], joining=in_doubt())
    assert backend.rows == [1]


class _Counted(Backend):
    """Another backend, and the rows of what it has run."""

    def __init__(self, backend: Backend, fails: Exception | None = None) -> None:
        self.rows: list[int] = []
        self._backend = backend
        self._fails = fails

    @property
    def provider(self) -> str:
        return self._backend.provider

    @property
    def precision(self) -> str:
        return self._backend.precision

    def give_up(self) -> None:
        self._backend.give_up()

    def compute_dtype(self, name: str) -> np.dtype[np.generic]:
        return self._backend.compute_dtype(name)

    def run(self, inputs: Tensors) -> Tensors:
        self.rows.append(len(next(iter(inputs.values()))))
        if self._fails is not None:
            raise self._fails
        return self._backend.run(inputs)
