"""What an answer says of itself beside its outputs."""

from __future__ import annotations

from protos.inference_pb2 import ModelInferResponse
from serve.engine.requests import RemarkedAnswer
from serve.engine.tensors import Tensors


def parameters_of(outputs: Tensors) -> bytes:
    """The parameters of an answer as a message of nothing else, which may stand behind the rest: protobuf merges the two.

    https://protobuf.dev/programming-guides/encoding/#last-one-wins
    """
    if not isinstance(outputs, RemarkedAnswer):
        return b""
    message = ModelInferResponse()
    for name, value in outputs.parameters.items():
        message.parameters[name].string_param = value
    return message.SerializeToString(deterministic=True)
