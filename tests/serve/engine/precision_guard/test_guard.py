"""The guard alone, on batches made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protos.datatypes import BY_WIRE
from serve.engine.batches.answer import RemarkedAnswer
from serve.engine.batches.batch import Answered, Failed, run_batch
from serve.engine.precision_guard.degradation import LEAST_RUNS, Degradation
from serve.engine.precision_guard.drift import Distance
from serve.engine.precision_guard.fallback import Fallback
from serve.engine.precision_guard.guard import PrecisionGuard
from serve.engine.precision_guard.settings import Policy
from serve.engine.precision_guard.tally import KEPT_EVENTS, Tally
from serve.engine.precision_guard.twin import Fp32Twin
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array, Tensors, TensorSpec

TWIN_VALUE = 7.0


class Constant:
    """A twin that answers `value` in "y" and 3 in "n", `rows_each` per row; fails where x is 13.

    Attributes:
        rows: of each run.
    """

    provider = "test"
    precision = "fp32"

    def __init__(self, value: float = TWIN_VALUE, *, rows_each: int = 1) -> None:
        self.rows: list[int] = []
        self._value = value
        self._rows_each = rows_each

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def give_up(self) -> None:
        """Nothing."""

    def run(self, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        self.rows.append(len(x))
        if (x == 13).any():
            raise ValueError("thirteen")
        rows = len(x) * self._rows_each
        return {"y": np.full((rows, 2), self._value, np.float32), "n": np.full((rows, 1), 3, np.int64)}


def guard_of(policy: Policy, twin: Constant | None = None, *, batched: bool = True) -> PrecisionGuard:
    specs = [
        TensorSpec(name="y", datatype=BY_WIRE["FP16"], shape=(-1, 2)),
        TensorSpec(name="n", datatype=BY_WIRE["INT64"], shape=(-1, 1)),
    ]
    fallback = None if twin is None else Fallback(Fp32Twin(lambda: twin))
    return PrecisionGuard(specs, Tally("m/1", policy, ["y", "n"], None), policy=policy, batched=batched, fallback=fallback)


def batch(
    *rows: int, outputs: tuple[str, ...] = ("y", "n"), bad: tuple[int, ...] = ()
) -> tuple[Any, Tensors, dict[str, Array]]:
    """Requests of so many rows, with 1 in every input and output but the "y" of the rows that are bad."""
    requests = [InferRequest({}, outputs, count, None, None, lambda _: None) for count in rows]
    total = sum(rows)
    y = np.ones((total, 2), np.float16)
    y[list(bad), 1] = np.nan
    return requests, {"x": np.ones((total, 1), np.float16)}, {"y": y, "n": np.ones((total, 1), np.int64)}


def test_finite_answers_pass() -> None:
    guard = guard_of(Policy.REJECT)
    assert guard.after(*batch(1, 2)) is None
    assert guard.counters().outputs["y"].non_finite_values == 0


def test_each_request_is_judged_by_its_own_rows() -> None:
    verdict = guard_of(Policy.REJECT).after(*batch(2, 3, 1, bad=(2, 4)))
    assert verdict is not None
    assert list(verdict.rejected) == [1]
    assert str(verdict.rejected[1]).startswith("output 'y' holds 2 of 6 values that are NaN or infinite, though every input is")


def test_requests_with_bad_inputs_are_let_be_and_counted_apart() -> None:
    requests, inputs, outputs = batch(2, 1, 3, 1, bad=(1, 2, 4, 6))
    inputs["x"][[0, 3]] = np.inf  # rows of the first and the third
    guard = guard_of(Policy.REJECT)
    verdict = guard.after(requests, inputs, outputs)
    assert verdict is not None
    assert sorted(verdict.rejected) == [1, 3]
    counted = guard.counters().outputs["y"]
    assert (counted.non_finite_requests, counted.non_finite_values, counted.from_inputs) == (2, 2, 2)


@pytest.mark.parametrize("batched", [False, True])
def test_a_request_alone_with_bad_inputs_is_let_be(batched: bool) -> None:
    requests, inputs, outputs = batch(1, bad=(0,))
    inputs["x"][0] = np.nan
    guard = guard_of(Policy.REJECT, batched=batched)
    assert guard.after(requests, inputs, outputs) is None
    assert guard.counters().outputs["y"].from_inputs == 1


def test_one_bad_input_is_enough_to_be_let_be() -> None:
    requests, inputs, outputs = batch(1, bad=(0,))
    guard = guard_of(Policy.REJECT)
    assert guard.after(requests, {**inputs, "z": np.full((1, 1), np.inf, np.float16)}, outputs) is None
    assert guard.counters().outputs["y"].from_inputs == 1


def test_rows_that_only_fill_the_batch_up_are_nobodys() -> None:
    requests, inputs, outputs = batch(2, 1, bad=(2,))
    guard = guard_of(Policy.REJECT)
    assert guard.after(requests[:1], inputs, outputs) is None
    assert guard.counters().outputs["y"].non_finite_values == 0


def test_an_output_that_nobody_asked_for_is_counted_only() -> None:
    guard = guard_of(Policy.REJECT)
    assert guard.after(*batch(1, outputs=("n",), bad=(0,))) is None
    counters = guard.counters()
    assert (counters.outputs["y"].non_finite_values, counters.rejected) == (1, 0)


def test_the_twin_answers_all_that_are_bad_in_one_run_and_only_those() -> None:
    twin = Constant()
    requests, inputs, outputs = batch(2, 1, 3, bad=(0, 5))
    before = {name: array.copy() for name, array in outputs.items()}
    verdict = guard_of(Policy.FALLBACK, twin).after(requests, inputs, outputs)
    assert verdict is not None
    assert twin.rows == [5]
    assert verdict.outputs["y"].tolist() == [[7, 7]] * 2 + [[1, 1]] + [[7, 7]] * 3
    assert verdict.outputs["n"].ravel().tolist() == [3, 3, 1, 3, 3, 3]
    assert verdict.outputs["y"].dtype == np.float16
    assert [r.response_parameters for r in requests] == [{"halfserve.precision": "fp32"}, None, {"halfserve.precision": "fp32"}]
    assert all(np.array_equal(outputs[name], before[name], equal_nan=True) for name in outputs)


def test_each_gets_what_the_twin_answers_to_its_own_rows() -> None:
    class Telling(Constant):
        def run(self, inputs: Tensors) -> Tensors:
            return {**super().run(inputs), "y": np.repeat(inputs["x"], 2, axis=1)}

    requests, inputs, outputs = batch(2, 1, 3, 2, bad=(0, 4, 7))
    inputs["x"][:, 0] = np.arange(8) + 20
    verdict = guard_of(Policy.FALLBACK, Telling()).after(requests, inputs, outputs)
    assert verdict is not None
    assert verdict.outputs["y"][:, 0].tolist() == [20, 21, 1, 23, 24, 25, 26, 27]


def test_a_request_that_is_rejected_has_no_other_end() -> None:
    class Overflowing(Constant):
        def run(self, inputs: Tensors) -> Tensors:
            return {**super().run(inputs), "y": np.where(inputs["x"] == 2, np.inf, inputs["x"]).astype(np.float16)}

    requests = [InferRequest({"x": np.full((1, 2), x, np.float32)}, ("y",), 1, None, None, lambda _: None) for x in range(4)]
    results = run_batch(Overflowing(), requests, guard_of(Policy.REJECT))
    failed, answered = results
    assert isinstance(failed, Failed)
    assert failed.request is requests[2]
    assert isinstance(answered, Answered)
    assert answered.requests == [requests[0], requests[1], requests[3]]
    assert [answer["y"].tolist() for answer in answered.answers] == [[[0, 0]], [[1, 1]], [[3, 3]]]
    assert not any(isinstance(answer, RemarkedAnswer) for answer in answered.answers)


def test_a_model_without_a_batch_dimension_is_answered_whole() -> None:
    requests, inputs, outputs = batch(2, bad=(1,))
    assert guard_of(Policy.FALLBACK, Constant(), batched=False).after(*batch(2)) is None
    verdict = guard_of(Policy.FALLBACK, Constant(), batched=False).after(requests, inputs, outputs)
    assert verdict is not None
    assert verdict.outputs["y"].tolist() == [[7, 7]] * 2


def test_a_request_computed_alone_is_judged_by_all_rows_that_it_gets() -> None:
    (request,), inputs, _ = batch(1)
    _, _, outputs = batch(3, bad=(2,))  # as models answer that find boxes
    verdict = guard_of(Policy.REJECT).after([request], inputs, outputs)
    assert verdict is not None
    assert str(verdict.rejected[0]).startswith("output 'y' holds 1 of 6 values that are NaN or infinite")


def test_a_request_computed_alone_is_answered_anew_with_all_its_rows() -> None:
    (request,), inputs, _ = batch(1)
    _, _, outputs = batch(3, bad=(2,))
    twin = Constant(rows_each=3)
    verdict = guard_of(Policy.FALLBACK, twin).after([request], inputs, outputs)
    assert verdict is not None
    assert (verdict.outputs["y"].tolist(), verdict.rejected) == ([[7, 7]] * 3, {})


def test_what_fp32_finds_infinite_too_is_the_models_own_answer() -> None:
    requests, inputs, outputs = batch(1, bad=(0,))
    verdict = guard_of(Policy.FALLBACK, Constant(-np.inf)).after(requests, inputs, outputs)
    assert verdict is not None
    assert verdict.outputs["y"].tolist() == [[-np.inf, -np.inf]]
    assert not verdict.rejected


def test_a_twin_that_fails_fails_the_bad_requests_alone() -> None:
    requests, inputs, outputs = batch(1, 1, bad=(1,))
    inputs["x"][1] = 13
    verdict = guard_of(Policy.FALLBACK, Constant()).after(requests, inputs, outputs)
    assert verdict is not None
    assert list(verdict.rejected) == [1]
    assert str(verdict.rejected[1]).endswith("though every input is finite; the fp32 twin failed on it too")


def test_a_twin_of_another_shape_helps_nobody() -> None:
    class Narrow(Constant):
        def run(self, inputs: Tensors) -> Tensors:
            return {**super().run(inputs), "y": np.zeros((len(inputs["x"]), 1), np.float32)}

    verdict = guard_of(Policy.FALLBACK, Narrow()).after(*batch(1, bad=(0,)))
    assert verdict is not None
    assert str(verdict.rejected[0]).endswith("the fp32 twin answers with output 'y' of another shape, [1, 1]")


def test_the_log_has_one_line_for_many_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    guard = guard_of(Policy.COUNT)
    for _ in range(KEPT_EVENTS + 50):
        guard.after(*batch(1, bad=(0,)))
    assert caplog.messages == ["m/1: passed on: output 'y' holds 1 of 2 values that are NaN or infinite"]
    assert len(guard.recent_events()) == KEPT_EVENTS
    assert guard.counters().outputs["y"].non_finite_requests == KEPT_EVENTS + 50


@pytest.mark.parametrize("blocks", [False, True])
def test_a_degraded_model_is_not_ready_where_the_configuration_says_so(blocks: bool) -> None:
    tally = Tally("m/1", Policy.COUNT, ["y"], Degradation(0.01))
    guard = PrecisionGuard([], tally, policy=Policy.COUNT, batched=True, degraded_not_ready=blocks)
    assert not guard.blocks_readiness
    for _ in range(LEAST_RUNS):
        tally.shadow_run({"y": Distance(1.0, 1.0, 1, 1)})
    assert guard.degraded
    assert guard.blocks_readiness is blocks
