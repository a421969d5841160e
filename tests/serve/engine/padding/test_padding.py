"""Requests of different lengths in one batch: padded, computed, and cut back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from halfserve.protos.datatypes import BY_WIRE
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.padding.padding import Padding, PaddingSettings
from halfserve.serve.engine.padding.padding_rule import parse_padding_rule
from halfserve.serve.engine.precision_guard.guard import GuardPolicy, PrecisionGuard
from halfserve.serve.engine.precision_guard.tally import Tally
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Array, RawInput, RawInputs, RawLayout, Tensors, TensorSpec
from tests.serve.engine.fakes import Computing


def echo(inputs: Tensors) -> Tensors:
    """x FP16 [rows, length], computed in fp32 -> twice FP32 [rows, length] and total [rows]."""
    return {"twice": inputs["x"] * 2, "total": inputs["x"].sum(1)}


def padding_of(rule: str = "x[1]=0 -> twice[1]", names: Sequence[str] = ("x",), **settings: Any) -> Padding:
    return Padding(PaddingSettings(rule=parse_padding_rule(rule), **settings), names)


def request_of(x: Array, outputs: tuple[str, ...] = ("twice", "total")) -> InferRequest:
    return InferRequest({"x": x}, outputs, len(x), x.shape[1:], None, print)


def row(*values: float) -> Array:
    return np.array([values], np.float16)


def answers_of(results: list[Answered | Failed]) -> list[Tensors]:
    (result,) = results
    assert isinstance(result, Answered)
    return result.answers


def test_rows_are_padded_to_the_longest_and_answers_are_cut() -> None:
    backend = Computing(echo)
    requests = [request_of(row(1, 2)), request_of(row(3)), request_of(np.array([[4, 5, 6], [7, 8, 9]], np.float16))]
    answers = answers_of(run_batch(backend, requests, padding=padding_of("x[1]=-1 -> twice[1]")))
    assert backend.seen[0]["x"].tolist() == [[1, 2, -1], [3, -1, -1], [4, 5, 6], [7, 8, 9]]
    assert [answer["twice"].tolist() for answer in answers] == [[[2, 4]], [[6]], [[8, 10, 12], [14, 16, 18]]]
    assert answers[0]["total"].tolist() == [2.0], "an output without the axis is left as the model gave it"


def test_answers_are_views_of_the_batch_and_write_their_own_bytes() -> None:
    requests = [request_of(row(1, 2), ("twice",)), request_of(row(3), ("twice",))]
    first, second = answers_of(run_batch(Computing(echo), requests, padding=padding_of()))
    assert first["twice"].base is second["twice"].base
    assert second["twice"].tobytes() == np.float32(6).tobytes()


def test_requests_of_one_length_are_not_padded() -> None:
    backend = Computing(echo)
    x = row(1, 2)
    alone = request_of(x)
    run_batch(backend, [alone], padding=padding_of())
    run_batch(backend, [alone, request_of(x)], padding=padding_of())
    assert [seen["x"].shape for seen in backend.seen] == [(1, 2), (2, 2)]
    assert padding_of().common_length([alone, request_of(x)]) == 0


def test_given_buckets_pad_a_lone_request_and_leave_longer_ones() -> None:
    backend, padding = Computing(echo), padding_of(buckets=(4, 8))
    (answer,) = answers_of(run_batch(backend, [request_of(row(1, 2, 3))], padding=padding))
    answers_of(run_batch(backend, [request_of(np.ones((1, 9), np.float16))], padding=padding))
    assert [seen["x"].shape for seen in backend.seen] == [(1, 4), (1, 9)]
    assert answer["twice"].tolist() == [[2, 4, 6]]


def test_rows_and_lengths_are_padded_together() -> None:
    backend = Computing(echo)
    requests = [request_of(row(1, 2)), request_of(row(3))]
    answers = answers_of(run_batch(backend, requests, padding=padding_of(), padded_sizes=(4,)))
    assert backend.seen[0]["x"].tolist() == [[1, 2], [3, 0], [3, 0], [3, 0]]
    assert [answer["twice"].tolist() for answer in answers] == [[[2, 4]], [[6]]]


def test_large_batches_are_padded_too() -> None:
    backend = Computing(echo)
    xs = [np.full((1, size), size % 7, np.float16) for size in (40_000, 1, 39_999)]
    answers = answers_of(run_batch(backend, [request_of(x) for x in xs], padding=padding_of()))
    for x, answer in zip(xs, answers, strict=True):
        assert np.array_equal(answer["twice"], x.astype(np.float32) * 2)
        assert answer["total"].tolist() == [x.astype(np.float32).sum()]


def raw_request(x: Array, *, shared: bool) -> InferRequest:
    entry = RawInput("x", x.dtype, x.shape, x.size, x.nbytes)

    def read(target: memoryview) -> None:
        target[:] = x.tobytes()

    readers = (read,) if shared else None
    inputs = RawInputs(RawLayout((entry,)), b"." + x.tobytes(), (1,), readers)  # unaligned
    return InferRequest(inputs, ("twice",), len(x), x.shape[1:], None, print)


def test_bytes_and_shared_memory_are_copied_into_the_padded_batch() -> None:
    requests = [raw_request(row(1, 2), shared=False), raw_request(row(3), shared=True), raw_request(row(4, 5), shared=True)]
    answers = answers_of(run_batch(Computing(echo), requests, padding=padding_of()))
    assert [answer["twice"].tolist() for answer in answers] == [[[2, 4]], [[6]], [[8, 10]]]


def test_shared_memory_that_is_gone_fails_its_request_only() -> None:
    gone = raw_request(row(3), shared=False)

    def read(_: memoryview) -> None:
        raise InvalidArgumentError("the region is gone")

    assert isinstance(gone.inputs, RawInputs)
    gone.inputs = RawInputs(gone.inputs.layout, b"", (0,), (read,))
    results = run_batch(Computing(echo), [raw_request(row(1, 2), shared=False), gone], padding=padding_of())
    assert [str(result.error) for result in results if isinstance(result, Failed)] == ["the region is gone"]


def test_a_square_mask_is_padded_in_both_axes() -> None:
    def request(size: int) -> InferRequest:
        x, pairs = np.ones((1, size), np.float32), np.full((1, size, size), size, np.float32)
        return InferRequest({"x": x, "pairs": pairs}, ("twice",), 1, ((size,), (size, size)), None, print)

    backend = Computing(lambda inputs: {"twice": inputs["x"] * 2})
    padding = padding_of("x[1]=0 pairs[1]=-5 pairs[2]=-5 -> twice[1]", ("x", "pairs"))
    answers_of(run_batch(backend, [request(1), request(2)], padding=padding))
    assert backend.seen[0]["pairs"].tolist() == [[[1, -5], [-5, -5]], [[2, 2], [2, 2]]]


def test_inputs_that_disagree_about_the_length_are_not_padded() -> None:
    padding = padding_of("x[1]=0 mask[1]=0", ("x", "mask"))
    assert padding.length_of(((3,), (4,))) is None
    fits = padding.length_of(((3,), (3,)))
    assert fits is not None
    assert fits.length == 3
    assert padding.length_of(object()) is None, "what is computed alone stays alone"


def test_an_output_that_is_not_as_long_as_its_inputs_fails_no_request() -> None:
    backend = Computing(lambda inputs: {"twice": inputs["x"][:, ::2]})
    results = run_batch(backend, [request_of(row(1, 2), ("twice",)), request_of(row(3), ("twice",))], padding=padding_of())
    assert all(isinstance(result, Answered) for result in results)
    assert len(backend.seen) == 3, "the shared batch cannot be cut, so each is computed alone"


def test_the_guard_rejects_only_the_request_with_non_finite_answers() -> None:
    overflowing = Computing(lambda inputs: {"twice": np.where(inputs["x"] > 100, np.inf, inputs["x"]).astype(np.float32)})
    spec = TensorSpec(name="twice", datatype=BY_WIRE["FP32"], shape=(-1, -1))
    guard = PrecisionGuard([spec], Tally("m/1", "reject", ["twice"], None), policy=GuardPolicy.REJECT, batched=True)
    requests = [request_of(row(1, 2, 3), ("twice",)), request_of(row(500), ("twice",)), request_of(row(4, 5), ("twice",))]
    failed, answered = run_batch(overflowing, requests, guard, padding=padding_of())
    assert isinstance(failed, Failed)
    assert failed.request is requests[1]
    assert isinstance(answered, Answered)
    assert [answer["twice"].tolist() for answer in answered.answers] == [[[1, 2, 3]], [[4, 5]]]


@pytest.mark.parametrize("shapes", [[(3,)] * 4, [(3,), (5,), (3,)]])
def test_requests_that_are_computed_together_get_what_they_get_alone(shapes: list[tuple[int]]) -> None:
    random = np.random.default_rng(0)
    requests = [request_of(random.standard_normal((2, *shape)).astype(np.float16)) for shape in shapes]
    together = answers_of(run_batch(Computing(echo), requests, padding=padding_of()))
    for request, answer in zip(requests, together, strict=True):
        (alone,) = answers_of(run_batch(Computing(echo), [request]))
        assert np.array_equal(alone["twice"], answer["twice"])
