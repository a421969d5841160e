"""Answers of a scripted stream, and a clock that stands still."""

from __future__ import annotations

from typing import Any

import numpy as np

from protos import inference_pb2 as pb


def streamed(index: str, *values: float, error: str = "", **parameters: Any) -> pb.ModelStreamInferResponse:
    """An answer of the model "m" to the request of an id."""
    response = pb.ModelStreamInferResponse(error_message=error)
    response.infer_response.id = index
    if values:
        response.infer_response.raw_output_contents.append(np.array(values, np.float32).tobytes())
        response.infer_response.outputs.add(name="y", datatype="FP32", shape=[len(values)])
    for name, value in parameters.items():
        field = "int64_param" if isinstance(value, int) else "string_param"
        setattr(response.infer_response.parameters[name.replace("_", "-")], field, value)
    return response


class Clock:
    """Stands for the module `time`: an hour passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now
