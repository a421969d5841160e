from __future__ import annotations

import numpy as np
import pytest

from protos.inference_pb2 import InferParameter, ModelInferResponse
from serve.engine.batches.answer import RemarkedAnswer
from serve.protocol.response_parameters import parameters_of

Y = {"y": np.zeros((1, 2), np.float16)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("fp32", InferParameter(string_param="fp32")),
        (True, InferParameter(bool_param=True)),
        (-3, InferParameter(int64_param=-3)),
        (0.25, InferParameter(double_param=0.25)),
    ],
    ids=["text", "bool", "int", "float"],
)
def test_each_kind_of_value_has_its_field(value: str | float, expected: InferParameter) -> None:
    message = ModelInferResponse.FromString(parameters_of(RemarkedAnswer(Y, {"remark": value})))
    assert message == ModelInferResponse(parameters={"remark": expected})


def test_behind_a_response_it_is_part_of_the_response() -> None:
    response = ModelInferResponse(model_name="m", raw_output_contents=[b"1234"])
    joined = ModelInferResponse.FromString(response.SerializeToString() + parameters_of(RemarkedAnswer(Y, {"remark": "fp32"})))
    assert (joined.model_name, list(joined.raw_output_contents), joined.parameters["remark"].string_param) == (
        "m",
        [b"1234"],
        "fp32",
    )


def test_an_ordinary_answer_says_nothing() -> None:
    assert parameters_of(Y) == b""
