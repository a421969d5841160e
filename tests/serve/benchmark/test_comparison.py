"""Comparison of load targets in speed and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import serialize_byte_tensor

from halfserve import Client
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.comparison import ComparedLevel, Difference, compare, differences
from halfserve.serve.benchmark.level import Level, Load
from tests.serve.benchmark.levels import level

LOAD = Load(concurrency=2)
# Milliseconds per request, by target and round; each level has one request in two seconds per latency.
SPEEDS = {0: [4.0, 8.0, 4.0], 1: [2.0, 2.0, 2.0]}
WIRES = {"object": "BYTES", "float16": "FP16", "float32": "FP32", "int64": "INT64", "uint16": "BF16"}
REQUESTS = [pb.ModelInferRequest(), pb.ModelInferRequest()]


def test_rounds_are_interleaved_and_ratios_are_within_a_round() -> None:
    asked: list[int] = []

    def measure(number: int, load: Load) -> Level:
        asked.append(number)
        latency_ms = SPEEDS[number][asked.count(number) - 1]
        return level(load=load, latencies_ms=[latency_ms] * round(80 / latency_ms))

    first, second = compare(["slow", "fast"], LOAD, 3, measure)
    assert asked == [0, 1, 0, 1, 0, 1]
    assert (first.rate_ratio.median, first.rate_ratio.low, first.rate_ratio.high) == (1, 1, 1)
    assert (second.rate_ratio.median, second.rate_ratio.low, second.rate_ratio.high) == (2, 2, 4)
    assert second.p99_ratio.median == pytest.approx(0.5, rel=1e-3)
    assert second.per_second.median == 20
    assert second.to_json()["rate_ratio"] == {"median": 2, "low": 2, "high": 4}
    assert second.rate_ratio.text == "2.00 (2.00-4.00)"


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), BenchmarkError("the server has gone")])
@pytest.mark.parametrize(("measured", "rounds"), [(0, 0), (1, 0), (2, 1), (5, 2)])
def test_complete_rounds_are_kept_when_a_round_fails(ending: BaseException, measured: int, rounds: int) -> None:
    left = [level(load=LOAD)] * measured

    def measure(number: int, load: Load) -> Level:
        if not left:
            raise ending
        return left.pop()

    kept: list[ComparedLevel] = []
    with pytest.raises(type(ending)):
        kept += compare(["a", "b"], LOAD, 9, measure)
    assert [(one.name, len(one.rounds)) for one in kept] == ([("a", rounds), ("b", rounds)] if rounds else [])


def test_the_base_may_be_another() -> None:
    def measure(number: int, load: Load) -> Level:
        return level(load=load, latencies_ms=[1.0] * (number + 1))

    first, last = compare(["a", "b"], LOAD, 1, measure, base=-1)
    assert (first.rate_ratio.median, last.rate_ratio.median) == (0.5, 1)


def test_failures_and_batch_sizes_of_all_rounds_are_summarized() -> None:
    (one,) = compare(["a"], LOAD, 2, lambda number, load: level(load=load, errors={"INTERNAL": 3}))
    assert (one.failed, one.mean_batch_size) == (6, 4)
    (mute,) = compare(["a"], LOAD, 2, lambda number, load: level(load=load, server=None))
    assert mute.mean_batch_size is None


class Answering(Client):
    """Answers with arrays instead of asking a server."""

    def __init__(self, *answers: dict[str, np.ndarray[Any, Any]]) -> None:
        self._answers = iter(answers)

    def infer_message(self, request: pb.ModelInferRequest, **_: Any) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse()
        for name, array in next(self._answers).items():
            response.outputs.add(name=name, datatype=WIRES[array.dtype.name], shape=array.shape)
            response.raw_output_contents.append(
                serialize_byte_tensor(array).item() if array.dtype.hasobject else array.tobytes()
            )
        return response


def differences_of(
    ours: Client, theirs: Client, requests: Sequence[pb.ModelInferRequest] = REQUESTS[:1]
) -> tuple[Sequence[Difference], Sequence[str]]:
    found = differences("theirs", ours, requests, theirs, requests)
    return found.outputs, found.not_compared


def test_the_largest_error_over_the_largest_value_of_the_same_answer() -> None:
    ours = Answering({"y": np.array([[1.0, 2.5]], np.float16)}, {"y": np.array([[100.0, 90.0]], np.float16)})
    theirs = Answering({"y": np.array([[1.0, 2.0]], np.float32)}, {"y": np.array([[99.0, 100.0]], np.float32)})
    (found,), alone = differences_of(ours, theirs, REQUESTS)
    assert (found.output, found.max_abs, found.scaled, found.mismatched) == ("y", 10.0, 0.25, 0)
    assert (found.agreement, alone) == (0.5, [])


def test_elements_finite_on_one_side_count_as_mismatched() -> None:
    ours = Answering({"y": np.array([np.inf, 1.0, np.nan], np.float16)})
    theirs = Answering({"y": np.array([70000.0, 1.0, np.nan], np.float32)})
    (found,), _ = differences_of(ours, theirs)
    assert (found.max_abs, found.mismatched, found.agreement) == (0.0, 1, None)


def test_bf16_is_compared_by_value() -> None:
    bits = (np.array([[1.5, -2.0]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ours, theirs = Answering({"y": bits}), Answering({"y": np.array([[1.5, -4.0]], np.float32)})
    (found,), _ = differences_of(ours, theirs)
    assert (found.max_abs, found.scaled) == (2.0, 0.5)


def test_outputs_of_one_side_or_another_shape_are_named() -> None:
    ours = Answering({"y": np.zeros((1, 2), np.float32), "z": np.zeros(1, np.int64), "s": np.zeros(3, np.float32)})
    theirs = Answering({"y": np.zeros((1, 2), np.float32), "t": np.zeros(1, np.int64), "s": np.zeros(4, np.float32)})
    found, alone = differences_of(ours, theirs)
    assert [one.output for one in found] == ["y"]
    assert alone == ["s", "t", "z"]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_equal_answers_differ_by_nothing(scale: float) -> None:
    answer = {"y": np.arange(6, dtype=np.float32).reshape(2, 3) * scale}
    (found,), _ = differences_of(Answering(answer), Answering(answer))
    assert found == Difference(output="y", max_abs=0, scaled=0, mismatched=0, rows=found.rows)


def test_texts_are_equal_or_not_and_a_number_is_no_text() -> None:
    words, numbers = np.array([[b"a", b"b"]], np.object_), np.zeros((1, 2), np.float32)
    ours = Answering({"y": words, "n": numbers}, {"y": words, "n": numbers})
    theirs = Answering({"y": np.array([[b"a", b"c"]], np.object_), "n": words}, {"y": numbers, "n": numbers})
    mixed, texts = differences_of(ours, theirs, REQUESTS)[0]
    assert (texts.mismatched, texts.max_abs, texts.agreement) == (1 + 2, 0.0, None)
    assert (mixed.mismatched, mixed.max_abs, mixed.agreement) == (2, 0.0, 1.0)


def test_an_answer_without_rows_agrees_in_none() -> None:
    rows, none = np.eye(2, 5, dtype=np.float32), np.zeros((0, 5), np.float32)
    (found,), _ = differences_of(Answering({"y": none}), Answering({"y": none}))
    assert found == Difference(output="y", max_abs=0, scaled=0, mismatched=0)
    (found,), _ = differences_of(Answering({"y": rows}, {"y": none}), Answering({"y": rows}, {"y": none}), REQUESTS)
    assert found.agreement == 1.0
