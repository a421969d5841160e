from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.engine.errors import BackendError, InstanceLostError, OutOfMemoryError, is_out_of_memory
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.execution.memory_limit import FIRST_WAIT_S, LONGEST_WAIT_S, MemoryLimit
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import FakeBackend
from tests.serve.runtimes import RUNTIMES


class Cramped(FakeBackend):
    def __init__(self, room: int) -> None:
        self.room = room  # rows that fit
        self.runs: list[int] = []  # rows of each run that was tried
        self.breaks = False  # it computes nothing more once memory has run out
        self._is_broken = False

    def run(self, inputs: Tensors) -> Tensors:
        rows = len(inputs["x"])
        self.runs.append(rows)
        if self._is_broken:
            raise InstanceLostError("broken")
        if rows > self.room:
            self._is_broken = self.breaks
            raise RuntimeError("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 4096")
        return {"y": inputs["x"] * 2}


class Scene:
    """A limit with a clock that stands still until it is moved."""

    def __init__(self, room: int) -> None:
        self.now = 1000.0
        self.backend = Cramped(room)
        self.limit = MemoryLimit("m/1 instance 0", lambda: self.now)

    def run(self, rows: int) -> list[int]:
        """Compute so many rows; the sizes of the runs that it took."""
        self.backend.runs.clear()
        x = np.arange(rows, dtype=np.float32).reshape(-1, 1)
        assert (self.limit.run(self.backend, {"x": x}, rows)["y"] == 2 * x).all()
        return list(self.backend.runs)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (np.exceptions.AxisError("axis 3"), False),
        (RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"), True),
        (RuntimeError("[CPU] FullyConnected node: Failed to allocate 1073741824 bytes of memory"), True),
        (RuntimeError("CUDA failure 2: out of memory ; GPU=0"), True),
        (RuntimeError("CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUBLAS failure 3: the resource allocation failed ; GPU=0"), True),
        (ValueError("indices out of bounds"), False),
    ],
    ids=["python", "numpy", "bad_alloc", "openvino", "cuda", "cudnn", "torch", "cublas", "cublas 13", "bounds"],
)
def test_errors_of_exhausted_memory_are_recognized(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    wrapped = BackendError("the model failed on this request")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is expected


def test_numpys_own_error_counts() -> None:
    with pytest.raises(MemoryError) as failed:
        np.empty(2**56)
    assert is_out_of_memory(failed.value)


def test_batches_beyond_the_memory_are_computed_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(room=5)
    assert scene.run(16) == [16, 8, 4, 4, 4, 4]
    assert scene.limit.rows == 4
    assert scene.run(6) == [4, 2]
    assert scene.run(3) == [3]
    assert caplog.messages == [
        "m/1 instance 0: out of memory with 8 rows at once; it computes at most 4 now, and tries more in 10 s"
    ]


def test_the_limit_grows_again_where_there_is_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene(room=4)
    scene.run(16)
    scene.backend.room = 100
    assert scene.run(16) == [4] * 4
    scene.now += FIRST_WAIT_S
    assert scene.run(16) == [8, 8]
    scene.now += FIRST_WAIT_S
    assert scene.run(16) == [16]
    assert scene.limit.rows is None
    assert scene.run(20) == [20]
    assert caplog.messages[-1] == "m/1 instance 0: it computes batches of any size again"


def test_the_limit_grows_in_steps_up_to_the_first_failure() -> None:
    scene = Scene(room=2)
    scene.run(16)
    scene.backend.room = 100
    for size in (4, 8, 16):
        scene.now += FIRST_WAIT_S
        assert scene.run(16) == [size] * (16 // size)


def test_the_first_failure_bounds_the_growth_for_good() -> None:
    scene = Scene(room=4)
    scene.run(16)
    scene.now += FIRST_WAIT_S
    assert scene.run(16) == [8, 4, 4, 4, 4]
    scene.backend.room = 8
    scene.now += 2 * FIRST_WAIT_S
    for _ in range(2):
        assert scene.run(16) == [8, 8]


def test_the_limit_does_not_grow_for_batches_that_fit() -> None:
    scene = Scene(room=4)
    scene.run(16)
    scene.now += FIRST_WAIT_S
    assert scene.run(4) == [4]
    assert scene.limit.rows == 4


def test_the_wait_doubles_after_a_failed_growth() -> None:
    scene = Scene(room=4)
    scene.run(16)
    waits = []
    for _ in range(8):
        start = scene.now
        while scene.run(16) == [4] * 4:
            scene.now += FIRST_WAIT_S
        waits.append(scene.now - start)
        assert scene.limit.rows == 4
    assert waits == [10, 20, 40, 80, 160, 320, LONGEST_WAIT_S, LONGEST_WAIT_S]


def test_the_wait_is_reset_after_a_long_success() -> None:
    scene = Scene(room=4)
    scene.run(16)
    scene.now += FIRST_WAIT_S
    scene.run(16)  # in vain
    scene.backend.room = 8
    scene.now += 2 * FIRST_WAIT_S
    assert scene.run(16) == [8, 8]
    scene.backend.room = 4
    scene.now += 4 * FIRST_WAIT_S
    assert scene.run(8) == [8, 4, 4]
    scene.backend.room = 8
    scene.now += FIRST_WAIT_S
    assert scene.run(16) == [8, 8]


def test_a_copy_that_breaks_without_memory_leaves_a_smaller_limit(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(room=5)
    assert scene.run(3) == [3]
    scene.backend.breaks = True
    with pytest.raises(InstanceLostError):
        scene.run(16)
    scene.backend = Cramped(5)
    assert scene.run(16) == [3, 3, 3, 3, 3, 1]
    assert caplog.messages == [
        "m/1 instance 0: out of memory with 16 rows at once; it computes at most 3 now, and tries more in 10 s"
    ]


@pytest.mark.long  # memory is bounded for a process of its own
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_model_without_enough_memory_answers_in_pieces(tmp_path: Path, runtime: str) -> None:
    program = [sys.executable, "-m", "tests.serve.engine.execution.cramped_program", runtime, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert any("out of memory with " in line for line in lines), done.stderr
    assert done.stdout.split() == ["512", "512", "512"]


def test_one_row_that_does_not_fit_is_an_error_that_says_so() -> None:
    scene = Scene(room=0)
    with pytest.raises(OutOfMemoryError, match="the server's memory does not suffice for this request"):
        scene.run(4)
    assert scene.backend.runs == [4, 2, 1]
    assert scene.limit.rows is None, "others' batches are not to suffer for it"


def test_other_errors_are_not_touched() -> None:
    scene = Scene(room=8)
    with pytest.raises(KeyError):
        scene.limit.run(scene.backend, {"z": np.zeros((2, 1))}, 2)
    assert scene.limit.rows is None


@settings(max_examples=40)
@given(room=st.integers(1, 40), batches=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 3.0, 11.0])), max_size=30))
def test_batches_that_fit_row_by_row_are_answered(room: int, batches: list[tuple[int, float]]) -> None:
    scene = Scene(room)
    for rows, pause in batches:
        scene.run(rows)
        scene.now += pause
        assert scene.limit.rows is None or 1 <= scene.limit.rows <= 2 * room


def test_requests_of_a_split_batch_get_their_answers() -> None:
    scene = Scene(room=3)
    requests = [
        InferRequest({"x": np.full((rows, 1), rows, np.float32)}, ("y",), rows, (1,), None, lambda _: None)
        for rows in (1, 5, 2)
    ]
    (answered,) = run_batch(scene.backend, requests, memory=scene.limit)
    assert isinstance(answered, Answered)
    assert [answer["y"].ravel().tolist() for answer in answered.answers] == [[2], [10] * 5, [4, 4]]
    scene.backend.room = 0
    assert all(
        isinstance(result, Failed) and isinstance(result.error, OutOfMemoryError)
        for result in run_batch(scene.backend, requests, memory=scene.limit)
    )
