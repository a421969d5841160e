"""Python values as the protocol's parameters, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from protos.inference_pb2 import InferParameter, ModelInferRequest
from serve.client.checks import check_text, is_above_0
from serve.client.errors import InvalidRequest

Parameter = bool | int | float | str
SEQUENCE_ID = "sequence_id"
MICROSECONDS = 1_000_000


def add_parameters(
    request: ModelInferRequest, parameters: Mapping[str, Parameter] | None, *, priority: int, queue_timeout_s: float | None
) -> None:
    """Write a request's parameters.

    Raises:
        InvalidRequest: a value has no place in the protocol, or is out of its range.
    """
    for key, value in (parameters or {}).items():
        check_text(key, "a parameter's name")
        request.parameters[key].CopyFrom(_parameter(key, value))
    if priority:
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 < priority < 2**32:
            raise InvalidRequest(f"priority must be a whole number, 1 for the most urgent, not {priority!r}")
        request.parameters["priority"].int64_param = priority
    if queue_timeout_s is not None:
        if not is_above_0(queue_timeout_s) or not queue_timeout_s < 2**43:
            raise InvalidRequest(f"queue_timeout_s must be seconds above 0, or None, not {queue_timeout_s!r}")
        request.parameters["timeout"].int64_param = max(1, round(queue_timeout_s * MICROSECONDS))


def is_stateful(request: ModelInferRequest) -> bool:
    """Whether the request belongs to a sequence, in which each step changes what the model remembers."""
    return SEQUENCE_ID in request.parameters


def values_of(parameters: Mapping[str, InferParameter]) -> dict[str, Parameter]:
    """The values of a map of parameters; one that is empty, or of a kind that is not known here, is left out."""
    chosen = {key: parameter.WhichOneof("parameter_choice") for key, parameter in parameters.items()}
    return {key: getattr(parameters[key], choice) for key, choice in chosen.items() if choice is not None}


def _parameter(key: str, value: Any) -> InferParameter:
    if isinstance(value, bool | np.bool_):
        return InferParameter(bool_param=bool(value))
    if isinstance(value, int | np.integer):
        return _integer_parameter(key, int(value))
    if isinstance(value, float | np.floating):
        return InferParameter(double_param=float(value))
    if isinstance(value, str):
        check_text(value, f"parameter {key!r}")
        return InferParameter(string_param=value)
    raise InvalidRequest(f"parameter {key!r} must be a bool, int, float or str, not {type(value).__name__}")


def _integer_parameter(key: str, value: int) -> InferParameter:
    if -(2**63) <= value < 2**63:
        return InferParameter(int64_param=value)
    if 0 <= value < 2**64:
        return InferParameter(uint64_param=value)
    raise InvalidRequest(f"parameter {key!r} must fit 64 bits, not {value}")
