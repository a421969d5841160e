"""Requests share batches only while each row gets what it gets alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, BackendView, DevicePlacement, Runtime
from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import BackendError, InstanceLostError, OutOfMemoryError
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.execution.memory_limit import MemoryLimit
from halfserve.serve.engine.execution.runners import make_instance
from halfserve.serve.engine.execution.tensor_runner import Supervision
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.pace import CONFIDENT, BatchLimits, Pace
from halfserve.serve.engine.repository.model_loading import load_version, started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.trials.tried_version import TriedVersion
from halfserve.serve.trials.warm_up import warm_up
from tests.models import save_mlp, save_picky, save_text
from tests.serve.engine.fakes import FakeBackend, HeldBackend
from tests.serve.engine.scene import Answers
from tests.serve.engine.simulation import new_request, offer, queue, take
from tests.serve.running_server import running_server

WAITS = "dynamic_batching { max_queue_delay_microseconds: 200000 }"
TWO, NONE = [1.0, 1, 0, 0], [0.0, 0, 0, 0]


def save_detector(path: Path, rows: str = "n", found: str = "n") -> Path:
    """x FP32 [rows, 4] -> y INT64 [found, 2]: row and column of each element that is not 0."""
    text = f"(float[{rows}, 4] x) => (int64[{found}, 2] y) {{ z = NonZero(x)  y = Transpose<perm = [1, 0]>(z) }}"
    return save_text(path, text)


def loaded(root: Path, config: str = WAITS, runtime: Runtime | None = None) -> Model:
    (root / "m" / "config.pbtxt").write_text(config)
    (files,) = find_models(root)
    return load_version(files, runtime or OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())


def backend_of(root: Path, save: Callable[[Path], Path], runtime: Runtime | None = None) -> Backend:
    save(root / "m" / "1" / "model.onnx")
    (backend,) = loaded(root, runtime=runtime).backends
    return backend


def request(row: list[float]) -> InferRequest:
    return InferRequest({"x": np.array([row], np.float32)}, ("y",), 1, (4,), None, lambda _: None)


def test_the_warm_up_shows_that_rows_are_not_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture, runtime: Runtime) -> None:
    save_detector(tmp_path / "m" / "1" / "model.onnx")
    version = loaded(tmp_path, runtime=runtime)
    assert version.invariance is not None
    warm_up(TriedVersion(version, 5.0))
    assert not version.invariance.is_safe
    assert "m/1: output 'y' has shape [4, 2] for 1 rows; its requests are computed one by one from now on" in caplog.text
    assert len(caplog.records) == 1


def test_requests_that_may_not_be_joined_get_their_own(tmp_path: Path, runtime: Runtime) -> None:
    backend = backend_of(tmp_path, save_detector, runtime)
    invariance = BatchInvariance("m/1")
    run_batch(backend, [request(TWO)], invariance=invariance)
    results = run_batch(backend, [request(TWO), request(NONE), request([0, 0, 0, 1])], invariance=invariance)
    assert first_answers(results) == [[[0, 0], [0, 1]], [], [[0, 3]]]


def test_findings_during_bisection_hold_for_the_rest_of_the_batch(tmp_path: Path) -> None:
    """The last two found two things in two rows, which could be cut."""
    backend = backend_of(tmp_path, save_detector)
    rows = [TWO] * 4 + [[1.0, 0, 0, 1], NONE, TWO, TWO]
    results = run_batch(backend, [request(row) for row in rows], invariance=BatchInvariance("m/1"))
    answers = [answer["y"].tolist() for result in results if isinstance(result, Answered) for answer in result.answers]
    assert answers == [[[0, column] for column in np.flatnonzero(row)] for row in rows]


def test_a_batch_leaves_nothing_for_the_collector(tmp_path: Path) -> None:
    backend = backend_of(tmp_path, save_detector)
    kept = weakref.ref(backend)
    gc.disable()
    try:
        run_batch(backend, [request(TWO)], invariance=BatchInvariance("m/1"))
        del backend
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("known", [True, False])
def test_requests_that_cannot_share_batches_are_not_padded(tmp_path: Path, known: bool) -> None:
    backend = backend_of(tmp_path, save_detector)
    invariance = BatchInvariance("m/1")
    invariance.is_safe = not known
    results = run_batch(backend, [request(TWO)], padded_sizes=(4,), invariance=invariance)
    assert first_answers(results) == [[[0, 0], [0, 1]]]
    assert not invariance.is_safe


@pytest.mark.parametrize("limit", [1, None])
def test_a_batch_found_unsafe_in_pieces_is_computed_again(tmp_path: Path, limit: int | None) -> None:
    """Each piece counts its rows from 0."""
    backend = backend_of(tmp_path, save_detector)
    memory = MemoryLimit("m/1", clock=lambda: 0.0)
    memory.rows = limit
    rows = np.array([TWO, TWO], np.float32)
    asked = InferRequest({"x": rows}, ("y",), 2, (4,), None, lambda _: None)
    results = run_batch(backend, [asked], memory=memory, invariance=BatchInvariance("m/1"))
    assert first_answers(results) == [np.argwhere(rows).tolist()]


def test_memory_that_does_not_hold_a_request_is_said_to_be_the_reason() -> None:
    class Full(FakeBackend):
        def run(self, inputs: Tensors) -> Tensors:
            raise MemoryError(f"{len(inputs['x'])} rows")

    invariance = BatchInvariance("m/1")
    invariance.is_safe = False
    (result,) = run_batch(Full(), [request(TWO)], memory=MemoryLimit("m/1"), invariance=invariance)
    assert isinstance(result, Failed)
    assert isinstance(result.error, OutOfMemoryError)


def test_a_batch_invariant_model_is_batched(tmp_path: Path) -> None:
    save_mlp(tmp_path / "m" / "1" / "model.onnx")
    version = loaded(tmp_path)
    warm_up(TriedVersion(version, 5.0))
    assert version.invariance is not None
    assert version.invariance.is_safe


@pytest.mark.parametrize("found", ["n", "found", "unk__7"])
def test_two_clients_of_a_detector_get_their_own_objects(tmp_path: Path, found: str) -> None:
    """Together they would have found two things in two rows, which could be cut."""
    save_detector(tmp_path / "m" / "1" / "model.onnx", found=found)

    def models() -> list[Model]:
        version = loaded(tmp_path)
        warm_up(TriedVersion(version, 5.0))
        return [started(version)]

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
            thread.join(60)
    assert answers == {"two": [[0, 0], [0, 1]], "none": []}


@pytest.mark.parametrize(("found", "size"), [("n", 32), ("unk__7", 32), ("found", 0)])
def test_differently_named_dimensions_are_a_batch_only_if_declared(tmp_path: Path, found: str, size: int) -> None:
    save_detector(tmp_path / "m" / "1" / "model.onnx", found=found)
    assert loaded(tmp_path, "").config.max_batch_size == size
    assert loaded(tmp_path, "max_batch_size: 4").config.max_batch_size == 4


ROWS = [[1.0, 2, 3, 4], [-5.0, 0, 0, 7], [0.5, 9, 1, 1]]


def in_doubt() -> BatchInvariance:
    invariance = BatchInvariance("m/1")
    invariance.is_doubtful = True
    return invariance


def save_softmax_over_rows(path: Path) -> Path:
    return save_text(path, "(float[n, 4] x) => (float[n, 4] y) { y = Softmax<axis = 0>(x) }")


def first_answers(results: list[Answered | Failed]) -> list[Any]:
    return [result.answers[0]["y"].tolist() for result in results if isinstance(result, Answered)]


def batches(results: list[Answered | Failed]) -> list[int]:
    return [len(result.requests) for result in results if isinstance(result, Answered)]


@pytest.mark.parametrize(
    ("rows", "padded_sizes"), [(ROWS, ()), (ROWS, (8,)), (ROWS[:1] * 2, ())], ids=["plain", "filled up", "all the same"]
)
def test_rows_that_depend_on_each_other_are_never_answered_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rows: list[list[float]], padded_sizes: tuple[int, ...]
) -> None:
    backend, invariance = backend_of(tmp_path, save_softmax_over_rows), in_doubt()
    for _ in range(3):
        results = run_batch(backend, [request(row) for row in rows], padded_sizes=padded_sizes, invariance=invariance)
        assert first_answers(results) == [[[1.0] * 4]] * len(rows)
    assert not invariance.is_safe
    (message,) = caplog.messages
    assert message.startswith(
        "m/1: output 'y' of a row depends on the other rows of its batch; its requests are computed one by"
    )


def test_an_ordinary_model_is_looked_at_once(tmp_path: Path) -> None:
    backend = backend_of(tmp_path, save_mlp)
    invariance, counted = in_doubt(), _Counted(backend)
    requests = [request([float(column) for column in range(64)]), request([0.0] * 64)]
    assert batches(run_batch(counted, requests, invariance=invariance)) == [2]
    assert batches(run_batch(counted, requests, invariance=invariance)) == [2]
    assert counted.rows == [1, 1, 2, 2, 2]
    assert not invariance.is_doubtful


def test_rows_that_are_all_the_same_share_and_leave_the_doubt(tmp_path: Path) -> None:
    backend = backend_of(tmp_path, save_mlp)
    invariance, counted = in_doubt(), _Counted(backend)
    for _ in range(2):
        assert batches(run_batch(counted, [request([0.0] * 64) for _ in range(3)], invariance=invariance)) == [3]
    assert counted.rows == [1, 1, 2, 3, 3]
    assert invariance.is_doubtful


def test_a_failing_request_decides_nothing_and_the_others_are_answered(tmp_path: Path) -> None:
    backend = backend_of(tmp_path, save_picky)
    invariance = in_doubt()
    rows = [InferRequest({"i": np.array([[i]])}, ("y",), 1, (1,), None, lambda _: None) for i in (99, 0, 1)]
    bad, *good = run_batch(backend, rows, invariance=invariance)
    assert isinstance(bad, Failed)
    assert first_answers(good) == [[[10.0]], [[20.0]]]
    assert invariance.is_doubtful
    assert invariance.is_safe


def test_a_device_that_is_lost_in_a_look_is_not_asked_again(tmp_path: Path) -> None:
    backend = _Counted(
        backend_of(tmp_path, save_softmax_over_rows), fails=BackendError("CUDA failure 719: unspecified launch failure")
    )
    with pytest.raises(InstanceLostError):
        run_batch(backend, [request(row) for row in ROWS], invariance=in_doubt())
    assert backend.rows == [1]


@dataclass(frozen=True)
class _Counted(BackendView):
    """Another backend, and the rows of what it has run."""

    fails: Exception | None = None
    rows: list[int] = field(default_factory=list)

    def run(self, inputs: Tensors) -> Tensors:
        self.rows.append(len(next(iter(inputs.values()))))
        if self.fails is not None:
            raise self.fails
        return self._backend.run(inputs)


class Finding(HeldBackend):
    """Answers with a row more than it gets."""

    def run(self, inputs: Tensors) -> Tensors:
        y = super().run(inputs)["y"]
        return {"y": y.repeat(2, axis=0)[: len(y) + 1]}


def batcher_of(*backends: HeldBackend, invariance: BatchInvariance, max_delay_s: float = 0.0) -> Batcher:
    how = Supervision(label="m/1", invariance=invariance)
    instances = [make_instance(backend, number, how) for number, backend in enumerate(backends)]
    return Batcher(instances, BatchLimits(max_rows=8, max_delay_s=max_delay_s), Statistics())


async def test_every_copy_takes_one(answers: Answers) -> None:
    backends = [Finding(held=True), Finding(held=True)]
    invariance = BatchInvariance("m/1")
    invariance.is_safe = False
    batcher = batcher_of(*backends, invariance=invariance)
    for value in (1, 2):
        batcher.submit(answers.request(value))
    for backend in backends:
        assert await asyncio.to_thread(backend.entered.wait, 5), "one copy has taken both"
    for backend in backends:
        backend.release.set()
    await answers.all(2)
    assert sorted(chain.from_iterable(backend.batches for backend in backends)) == [[1], [2]]
    await batcher.drain()


async def test_a_model_that_is_not_batch_invariant_does_not_delay_requests(answers: Answers) -> None:
    backend, invariance = Finding(), BatchInvariance("m/1")
    batcher = batcher_of(backend, invariance=invariance, max_delay_s=3600.0)
    batcher.submit(answers.request(1))
    invariance.look({"y": np.zeros((2, 1))}, 1)
    batcher.submit(answers.request(2))
    await answers.all(2)
    assert backend.batches == [[1], [2]]
    await batcher.drain()


@pytest.mark.parametrize("learned", [False, True])
def test_a_parted_queue_gives_out_one_request_at_once(learned: bool) -> None:
    q = queue(max_delay_s=3600.0, preferred_rows=(6,))
    if learned:
        q.pace = Pace(q.limits)
        for _ in range(CONFIDENT):
            q.pace.observe("a", 1, 0.1)
    first, second = offer(q, new_request(rows=3), 0.0), offer(q, new_request(), 0.0)
    assert q.take(0.0) is None
    q.part()
    assert q.has_full_batch(0.0)
    assert take(q, 0.0).requests == [first]
    assert take(q, 0.0).requests == [second]
    offer(q, new_request(rows=8), 0.0)  # as large as it might be before
    assert take(q, 0.0).rows == 8
