from __future__ import annotations

import numpy as np

from protos.inference_pb2 import InferParameter, ModelInferResponse
from serve.engine.requests import RemarkedAnswer
from serve.protocol.response_parameters import parameters_of

Y = {"y": np.zeros((1, 2), np.float16)}


def test_remarks_are_texts() -> None:
    message = ModelInferResponse.FromString(parameters_of(RemarkedAnswer(Y, {"remark": "fp32"})))
    assert message == ModelInferResponse(parameters={"remark": InferParameter(string_param="fp32")})


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
