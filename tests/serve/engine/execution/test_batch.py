"""Running one batch: assembly, bisection, splitting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.engine.backend import Outcome, RequestBackend
from halfserve.serve.engine.errors import BackendError, InstanceLostError, InvalidArgumentError, OutOfMemoryError
from halfserve.serve.engine.execution.assembly import (
    SCRATCH_BYTES,
    BatchBuffers,
    assemble,
    device_inputs,
    lock_buffers,
    pad_rows,
    use_buffers,
)
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.execution.runners import run_requests
from halfserve.serve.engine.requests import CUT_BYTES, Answer, BatchOutputs, InferRequest
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Array, DeviceBytes, LateArray, LateInputs, RawInput, RawInputs, RawLayout, Tensors
from tests.serve.engine.fakes import Computing, FakeBackend

POISON = -1.0


class Doubling(FakeBackend):
    """Doubles x, after `check` has had a look at all rows."""

    def __init__(self, check: Callable[[Array], None] = lambda _: None) -> None:
        self.runs: list[list[float]] = []  # the rows of each run that was tried
        self._check = check

    def run(self, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        self.runs.append(x[:, 0].tolist())
        self._check(x)
        return {"y": x * 2}


def requests_of(values: list[float], rows: int = 1) -> list[InferRequest]:
    return [
        InferRequest({"x": np.full((rows, 1), value, np.float32)}, ("y",), rows, (1,), None, lambda _: None) for value in values
    ]


def no_poison(x: Array) -> None:
    if (x == POISON).any():
        raise ValueError("poison")


def outcomes(results: list[Answered | Failed]) -> dict[int, float | str]:
    """What each request got, by its identity: the first value of its answer or the error's text."""
    found: dict[int, float | str] = {}
    for result in results:
        if isinstance(result, Failed):
            assert id(result.request) not in found
            found[id(result.request)] = str(result.error)
        else:
            for request, answer in zip(result.requests, result.answers, strict=True):
                assert id(request) not in found
                found[id(request)] = float(answer["y"][0, 0])
    return found


@settings(max_examples=40)
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, POISON]), min_size=1, max_size=40))
def test_exactly_the_poisoned_requests_fail(values: list[float]) -> None:
    backend = Doubling(no_poison)
    requests = requests_of(values)
    found = outcomes(run_batch(backend, requests))
    assert [found[id(r)] for r in requests] == [
        "the model failed on this request: poison" if v == POISON else 2 * v for v in values
    ]


@settings(max_examples=40)
@given(size=st.integers(1, 64), place=st.integers(0, 63))
def test_finding_the_poisoned_one_takes_a_logarithm_of_runs(size: int, place: int) -> None:
    values = [1.0] * size
    values[place % size] = POISON
    backend = Doubling(no_poison)
    run_batch(backend, requests_of(values))
    assert len(backend.runs) <= 1 + 2 * math.ceil(math.log2(size))
    computed = [value for run in backend.runs if POISON not in run for value in run]
    assert len(computed) == size - 1  # each good one once


def test_a_half_known_to_fail_is_not_run_whole() -> None:
    backend = Doubling(no_poison)
    run_batch(backend, requests_of([1.0] * 7 + [POISON]))
    assert [len(run) for run in backend.runs] == [8, 4, 2, 1, 1]


def test_a_failure_that_does_not_recur_fails_no_request() -> None:
    failures = iter([ValueError("a hiccup")])

    def hiccup(_: Array) -> None:
        for failure in failures:
            raise failure

    requests = requests_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert list(outcomes(run_batch(Doubling(hiccup), requests)).values()) == [2.0, 4.0, 6.0, 8.0, 10.0]


def test_an_error_of_the_engines_own_is_kept() -> None:
    def refuse(_: Array) -> None:
        raise InvalidArgumentError("an element is not UTF-8")

    (failed,) = run_batch(Doubling(refuse), requests_of([1.0]))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidArgumentError)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_lost_device_ends_the_batch_at_once(wrap: bool) -> None:
    def lose(_: Array) -> None:
        lost = RuntimeError("CUDA error 700: an illegal memory access was encountered")
        if wrap:
            raise BackendError("the model failed on this request") from lost
        raise lost

    backend = Doubling(lose)
    with pytest.raises(InstanceLostError):
        run_batch(backend, requests_of([1.0, 2.0, 3.0]))
    assert len(backend.runs) == 1


@pytest.mark.parametrize(("rows", "ran"), [(1, 4), (3, 4), (4, 4), (5, 8), (9, 9)])
def test_padding_rows_are_not_in_the_answer(rows: int, ran: int) -> None:
    backend = Doubling()
    requests = requests_of([float(v) for v in range(rows)])
    results = run_batch(backend, requests, padded_sizes=(4, 8))
    assert [len(run) for run in backend.runs] == [ran]
    assert [outcomes(results)[id(r)] for r in requests] == [2.0 * v for v in range(rows)]
    (answered,) = results
    assert isinstance(answered, Answered)
    assert all(answer["y"].shape == (1, 1) for answer in answered.answers)


def test_one_request_is_filled_up_and_gets_its_own_rows() -> None:
    (answered,) = run_batch(Doubling(), requests_of([3.0], rows=3), padded_sizes=(4,))
    assert isinstance(answered, Answered)
    assert answered.answers[0]["y"].tolist() == [[6.0]] * 3


def test_requests_that_may_be_joined_are_run_together() -> None:
    backend = Doubling()
    (answered,) = run_batch(backend, requests_of([1.0, 2.0, 3.0]), invariance=BatchInvariance("m/1"))
    assert isinstance(answered, Answered)
    assert backend.runs == [[1.0, 2.0, 3.0]]


def test_a_model_that_loses_rows_answers_one_by_one() -> None:
    first_row = Computing(lambda inputs: {"y": inputs["x"][:1] * 2})
    assert list(outcomes(run_batch(first_row, requests_of([1.0, 2.0, 3.0]))).values()) == [2.0, 4.0, 6.0]


Make = Callable[[Array], Tensors]


def arrays(x: Array) -> Tensors:
    """As a request has them that was parsed."""
    return {"x": x}


def raw(x: Array, before: int = 3) -> RawInputs:
    """As a request has them whose bytes are still there."""
    entry = RawInput("x", x.dtype, x.shape, x.size, x.nbytes)
    return RawInputs(RawLayout((entry,)), bytes(before) + x.tobytes() + b"!", (before,))


def elsewhere(x: Array) -> RawInputs:
    """As a request has them whose bytes lie in shared memory."""
    entry = RawInput("x", x.dtype, x.shape, x.size, x.nbytes)

    def read(target: memoryview) -> None:
        target[:] = x.tobytes()

    return RawInputs(RawLayout((entry,)), b"", (0,), (read,))


def request(inputs: Tensors, rows: int) -> InferRequest:
    return InferRequest(inputs=inputs, outputs=("y",), rows=rows, bucket=1, deadline=None, done=lambda _: None)


HALF = np.dtype(np.float16)
makers = st.sampled_from([arrays, raw, partial(raw, before=4), elsewhere])


def test_two_threads_do_not_share_the_memory_of_their_batches() -> None:
    def assembled(value: int) -> Array:
        return assemble([request(raw(np.full((1, SCRATCH_BYTES), value, np.float16)), 1) for _ in range(2)], "x", HALF)

    here = assembled(1)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(assembled, 2).result()
        assert not np.shares_memory(here, there)
    assert ((here == 1).all(), (there == 2).all()) == (True, True)
    assert np.shares_memory(here, assembled(3)), "the next batch of a thread takes the place of its last"


@given(
    st.lists(st.tuples(makers, st.integers(1, 3)), min_size=1, max_size=5),
    st.sampled_from([1, 7, SCRATCH_BYTES // 4]),
    st.sampled_from([np.float16, np.float32]),
    st.integers(0, 20),
)
def test_a_batch_holds_all_rows_in_order(sources: list[tuple[Make, int]], width: int, dtype: Any, padded: int) -> None:
    start, requests, expected = 0, [], []
    for make, rows in sources:
        x = np.arange(start, start + rows * width).reshape(rows, width).astype(np.float16)
        start += 1000
        requests.append(request(make(x), rows))
        expected.append(x)
    batch = assemble(requests, "x", np.dtype(dtype), padded)
    assert batch.dtype == dtype
    assert batch.flags.aligned
    whole = np.concatenate(expected)
    np.testing.assert_array_equal(batch[: len(whole)], whole)
    np.testing.assert_array_equal(pad_rows(batch, padded), pad_rows(whole, padded))


def test_the_next_large_batch_uses_the_same_memory() -> None:
    x = np.ones((2, SCRATCH_BYTES), np.float16)
    first = assemble([request(raw(x), 2), request(raw(x), 2)], "x", x.dtype)
    second = assemble([request(raw(x + x), 2), request(raw(x), 2)], "x", x.dtype)
    assert np.shares_memory(first, second)
    assert (second[:2] == 2).all()


@pytest.mark.parametrize("count", [1, 2])
def test_a_large_batch_is_padded_in_place(count: int) -> None:
    x = np.ones((1, SCRATCH_BYTES), np.float16)
    batch = assemble([request(raw(x, before=4), 1) for _ in range(count)], "x", x.dtype, 4)
    assert batch.shape == (4, SCRATCH_BYTES)
    assert (batch == 1).all()
    assert np.shares_memory(batch, assemble([request(raw(x), 1)] * 2, "x", x.dtype))


def test_one_aligned_request_is_not_copied() -> None:
    inputs = raw(np.ones((1, SCRATCH_BYTES), np.float16), before=4)
    assert np.shares_memory(assemble([request(inputs, 1)], "x", np.dtype(np.float16)), inputs["x"])


def on_device(number: int, dtype: type[np.generic] = np.float32, rows: int = 1) -> InferRequest:
    """With rows of 4 numbers on a CUDA device."""
    entry = RawInput("x", np.dtype(dtype), (rows, 4), 4 * rows, 4 * rows * np.dtype(dtype).itemsize)
    place = DeviceBytes(number, 0x1000, lambda target: None)
    return request(RawInputs(RawLayout((entry,)), b"", (0,), (place,)), rows)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([on_device(1), on_device(1, rows=2)], ((5, 4), [(0x1000, 16), (0x1000, 32), (0x1010, 16), (0x1010, 16)])),
        ([on_device(1), on_device(0)], None),
        ([on_device(0)], None),
        ([on_device(1), request(raw(np.ones((1, 4), np.float32)), 1)], None),
        ([on_device(1), request(arrays(np.ones((1, 4), np.float32)), 1)], None),
        ([on_device(1, np.float16)], None),
    ],
    ids=["all there", "another device too", "another device", "bytes of a message", "an array", "another datatype"],
)
def test_only_batches_that_lie_on_the_device_as_a_whole_are_joined_there(
    requests: list[InferRequest], expected: tuple[tuple[int, ...], list[tuple[int, int]]] | None
) -> None:
    def found() -> tuple[tuple[int, ...], list[tuple[int, int]]] | None:
        use_buffers(BatchBuffers())
        assert device_inputs(Doubling(), requests, 5) is None, "the device is not known before the first batch"
        lock_buffers(1)
        inputs = device_inputs(Doubling(), requests, 5)
        return None if inputs is None else (inputs.rows["x"].shape, list(inputs.rows["x"].pieces))

    with ThreadPoolExecutor(1) as pool:  # a thread's buffers are its own
        assert pool.submit(found).result() == expected


def test_rows_without_elements_are_rows() -> None:
    empty = np.ones((2, 0), np.float32)
    assert assemble([request(raw(empty), 2), request(raw(empty), 2)], "x", empty.dtype).shape == (4, 0)


@pytest.mark.parametrize("width", [2, SCRATCH_BYTES])
def test_bytes_that_cannot_be_fetched_fail_the_batch(width: int) -> None:
    def gone(target: memoryview) -> None:
        raise KeyError(len(target))

    entry = RawInput("x", np.dtype(np.float16), (1, width), width, 2 * width)
    inputs = RawInputs(RawLayout((entry,)), b"", (0,), (gone,))
    with pytest.raises(KeyError, match=str(2 * width)):
        assemble([request(inputs, 1), request(inputs, 1)], "x", np.dtype(np.float16))


def test_raw_inputs_are_a_mapping_of_read_only_views() -> None:
    inputs = raw(np.arange(3, dtype=np.int32).reshape(1, 3))
    assert (list(inputs), len(inputs), inputs["x"].tolist()) == (["x"], 1, [[0, 1, 2]])
    assert not inputs["x"].flags.writeable
    with pytest.raises(KeyError):
        inputs["y"]


@pytest.mark.parametrize("width", [2, CUT_BYTES])
def test_an_answer_is_some_rows_as_arrays_and_as_bytes(width: int) -> None:
    y = np.arange(4 * width, dtype=np.int32).reshape(4, width)
    answer = Answer(BatchOutputs({"y": y, "z": -y}), ("y",), 1, 3)
    assert (list(answer), len(answer)) == (["y"], 1)
    np.testing.assert_array_equal(answer["y"], y[1:3])
    assert answer.raw("y", 4 * width) == y[1:3].tobytes()
    with pytest.raises(KeyError):
        answer["z"]


def test_small_batches_become_bytes_once() -> None:
    batch = BatchOutputs({"y": np.zeros((2, 3), np.float16)})
    assert batch.raw("y") is batch.raw("y")
    assert batch.row_shapes == ((3,),)


def late(value: float | None) -> LateInputs:
    """One number, as many as were sent; None is one that turns out wrong."""

    def read() -> Array:
        if value is None:
            raise InvalidArgumentError("input 'x' is wrong")
        return np.array([value], np.float32)

    return LateInputs({"x": LateArray((1, 1), read)})


def test_late_inputs_are_computed_and_wrong_ones_fail_alone() -> None:
    inputs: list[Tensors] = [late(4), late(None), {"x": np.full((1, 1), 6, np.float32)}, late(8)]
    requests = [InferRequest(x, ("y",), 1, (1,), None, lambda _: None) for x in inputs]
    answers: dict[int, Any] = {}
    failures = []
    for result in run_batch(Computing(lambda given: {"y": given["x"] / 2}), requests):
        if isinstance(result, Failed):
            failures.append(result)
        else:
            assert isinstance(result, Answered)
            answers |= {id(r): a["y"].tolist() for r, a in zip(result.requests, result.answers, strict=True)}
    assert answers == {id(requests[0]): [[2]], id(requests[2]): [[3]], id(requests[3]): [[4]]}
    (failed,) = failures
    assert failed.request is requests[1]
    assert (type(failed.error), str(failed.error)) == (InvalidArgumentError, "input 'x' is wrong")


def test_late_inputs_are_parsed_on_demand_and_not_kept() -> None:
    read: list[int] = []

    def note() -> Array:
        read.append(1)
        return np.arange(6)

    inputs = LateInputs({"x": LateArray((2, 3), note), "y": np.zeros(1)})
    assert (list(inputs), len(inputs), inputs["y"].tolist(), read) == (["x", "y"], 2, [0], [])
    assert inputs["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert inputs["x"].shape == (2, 3)
    assert len(read) == 2


def test_requests_for_which_memory_runs_out_leave_no_stack_trace(caplog: pytest.LogCaptureFixture) -> None:
    class Cramped(RequestBackend):
        def compute(self, requests: Sequence[InferRequest]) -> list[Outcome]:
            raise MemoryError

    results = run_requests(Cramped(), requests_of([1, 2]), 0)
    assert [type(result.error) for result in results if isinstance(result, Failed)] == [OutOfMemoryError] * 2
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("a batch of requests could not be computed: memory ran out", None)
