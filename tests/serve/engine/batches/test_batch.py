from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.batches.batch import Answered, Failed, run_batch
from serve.engine.device_faults import InstanceLostError
from serve.engine.errors import BackendError, InvalidArgumentError
from serve.engine.queueing.joining import Joining
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array, Tensors

POISON = -1.0


class Doubling:
    """Doubles x, after `check` has had a look at all rows.

    Attributes:
        runs: the rows of each run that was tried.
    """

    provider = "test"
    precision = "fp32"

    def __init__(self, check: Callable[[Array], None] = lambda _: None) -> None:
        self.runs: list[list[float]] = []
        self._check = check

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def give_up(self) -> None:
        """Nothing."""

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


def test_what_is_known_to_hold_the_poison_is_not_run_whole() -> None:
    backend = Doubling(no_poison)
    run_batch(backend, requests_of([1.0] * 7 + [POISON]))
    assert [len(run) for run in backend.runs] == [8, 4, 2, 1, 1]


def test_a_failure_that_does_not_come_again_fails_nobody() -> None:
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
def test_a_batch_is_filled_up_and_nobody_sees_it(rows: int, ran: int) -> None:
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
    (answered,) = run_batch(backend, requests_of([1.0, 2.0, 3.0]), joining=Joining("m/1"))
    assert isinstance(answered, Answered)
    assert backend.runs == [[1.0, 2.0, 3.0]]


def test_a_model_that_loses_rows_answers_one_by_one() -> None:
    class FirstRow(Doubling):
        def run(self, inputs: Tensors) -> Tensors:
            return {"y": super().run(inputs)["y"][:1]}

    backend = FirstRow()
    requests = requests_of([1.0, 2.0, 3.0])
    assert list(outcomes(run_batch(backend, requests)).values()) == [2.0, 4.0, 6.0]
