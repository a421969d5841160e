from __future__ import annotations

from typing import Any

import numpy as np

from serve.engine.batches.batch import Answered, Failed, run_batch
from serve.engine.batches.late_inputs import LateArray, LateInputs
from serve.engine.errors import InvalidArgumentError
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array, Tensors


class Halving:
    """Halves x."""

    provider = "test"
    precision = "fp32"

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def give_up(self) -> None:
        """Nothing."""

    def run(self, inputs: Tensors) -> Tensors:
        return {"y": inputs["x"] / 2}


def late(value: float | None) -> LateInputs:
    """One number, as many as were sent; None is one that turns out wrong."""

    def read() -> Array:
        if value is None:
            raise InvalidArgumentError("input 'x' is wrong")
        return np.array([value], np.float32)

    return LateInputs({"x": LateArray((1, 1), read)})


def test_what_was_read_late_is_computed_as_all_else_is_and_what_is_wrong_fails_alone() -> None:
    inputs: list[Tensors] = [late(4), late(None), {"x": np.full((1, 1), 6, np.float32)}, late(8)]
    requests = [InferRequest(x, ("y",), 1, (1,), None, lambda _: None) for x in inputs]
    answers: dict[int, Any] = {}
    failures = []
    for result in run_batch(Halving(), requests):
        if isinstance(result, Failed):
            failures.append(result)
        else:
            assert isinstance(result, Answered)
            answers |= {id(r): a["y"].tolist() for r, a in zip(result.requests, result.answers, strict=True)}
    assert answers == {id(requests[0]): [[2]], id(requests[2]): [[3]], id(requests[3]): [[4]]}
    (failed,) = failures
    assert failed.request is requests[1]
    assert (type(failed.error), str(failed.error)) == (InvalidArgumentError, "input 'x' is wrong")


def test_nothing_is_read_before_it_is_asked_for_or_kept_after() -> None:
    read: list[int] = []

    def note() -> Array:
        read.append(1)
        return np.arange(6)

    inputs = LateInputs({"x": LateArray((2, 3), note), "y": np.zeros(1)})
    assert (list(inputs), len(inputs), inputs["y"].tolist(), read) == (["x", "y"], 2, [0], [])
    assert inputs["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert inputs["x"].shape == (2, 3)
    assert len(read) == 2
