"""A whole answer: the outputs, and what the server says beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve.client.values.parameters import Parameter, values_of
from serve.client.values.tensors import Array

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelInferResponse


@dataclass(frozen=True, kw_only=True)
class InferAnswer:
    """What `InferenceClient.infer_detailed` returns.

    Attributes:
        model: that has answered.
        version: of it.
        request_id: as it was given.
        parameters: of the response, such as what the precision guard has done.
        outputs: name -> array, as `InferenceClient.infer` returns them.
    """

    model: str
    version: str
    request_id: str
    parameters: Mapping[str, Parameter]
    outputs: dict[str, Array]


def answer_of(response: ModelInferResponse, outputs: dict[str, Array]) -> InferAnswer:
    """The answer that a response and its outputs make."""
    return InferAnswer(
        model=response.model_name,
        version=response.model_version,
        request_id=response.id,
        parameters=values_of(response.parameters),
        outputs=outputs,
    )
