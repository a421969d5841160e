from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.utils import serialize_byte_tensor

from protos import inference_pb2 as pb
from serve.benchmark.accuracy import differences
from serve.client import InferenceClient

WIRES = {"object": "BYTES", "float16": "FP16", "float32": "FP32", "int64": "INT64", "uint16": "BF16"}


class Answering(InferenceClient):
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


REQUESTS = [pb.ModelInferRequest(), pb.ModelInferRequest()]


def test_the_largest_error_over_the_largest_value_of_the_same_answer() -> None:
    ours = Answering({"y": np.array([[1.0, 2.5]], np.float16)}, {"y": np.array([[100.0, 90.0]], np.float16)})
    theirs = Answering({"y": np.array([[1.0, 2.0]], np.float32)}, {"y": np.array([[99.0, 100.0]], np.float32)})
    (found,), alone = differences(ours, REQUESTS, theirs, REQUESTS)
    assert (found.output, found.max_abs, found.scaled, found.mismatched) == ("y", 10.0, 0.25, 0)
    assert (found.agreement, alone) == (0.5, [])


def test_what_is_finite_on_one_side_only_is_counted_and_not_subtracted() -> None:
    ours = Answering({"y": np.array([np.inf, 1.0, np.nan], np.float16)})
    theirs = Answering({"y": np.array([70000.0, 1.0, np.nan], np.float32)})
    (found,), _ = differences(ours, REQUESTS[:1], theirs, REQUESTS[:1])
    assert (found.max_abs, found.mismatched, found.agreement) == (0.0, 1, None)


def test_bf16_is_compared_by_value() -> None:
    bits = (np.array([[1.5, -2.0]], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ours, theirs = Answering({"y": bits}), Answering({"y": np.array([[1.5, -4.0]], np.float32)})
    (found,), _ = differences(ours, REQUESTS[:1], theirs, REQUESTS[:1])
    assert (found.max_abs, found.scaled) == (2.0, 0.5)


def test_outputs_of_one_side_or_another_shape_are_named() -> None:
    ours = Answering({"y": np.zeros((1, 2), np.float32), "z": np.zeros(1, np.int64), "s": np.zeros(3, np.float32)})
    theirs = Answering({"y": np.zeros((1, 2), np.float32), "t": np.zeros(1, np.int64), "s": np.zeros(4, np.float32)})
    found, alone = differences(ours, REQUESTS[:1], theirs, REQUESTS[:1])
    assert [one.output for one in found] == ["y"]
    assert alone == ["s", "t", "z"]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_equal_answers_differ_by_nothing(scale: float) -> None:
    answer = {"y": np.arange(6, dtype=np.float32).reshape(2, 3) * scale}
    (found,), _ = differences(Answering(answer), REQUESTS[:1], Answering(answer), REQUESTS[:1])
    assert found.to_json() == {"output": "y", "max_abs": 0, "scaled": 0, "mismatched": 0, "agreement": 1.0}


def test_texts_are_equal_or_not_and_a_number_is_no_text() -> None:
    words, numbers = np.array([[b"a", b"b"]], np.object_), np.zeros((1, 2), np.float32)
    ours = Answering({"y": words, "n": numbers}, {"y": words, "n": numbers})
    theirs = Answering({"y": np.array([[b"a", b"c"]], np.object_), "n": words}, {"y": numbers, "n": numbers})
    mixed, texts = differences(ours, REQUESTS, theirs, REQUESTS)[0]
    assert (texts.mismatched, texts.max_abs, texts.agreement) == (1 + 2, 0.0, None)
    assert (mixed.mismatched, mixed.max_abs, mixed.agreement) == (2, 0.0, 1.0)


def test_an_answer_without_rows_agrees_in_none() -> None:
    rows, none = np.eye(2, 5, dtype=np.float32), np.zeros((0, 5), np.float32)
    (found,), _ = differences(Answering({"y": none}), REQUESTS[:1], Answering({"y": none}), REQUESTS[:1])
    assert found.to_json() == {"output": "y", "max_abs": 0, "scaled": 0, "mismatched": 0, "agreement": None}
    (found,), _ = differences(Answering({"y": rows}, {"y": none}), REQUESTS, Answering({"y": rows}, {"y": none}), REQUESTS)
    assert found.agreement == 1.0
