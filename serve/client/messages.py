"""ModelInferRequest from named arrays, named arrays from ModelInferResponse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from protos.inference_pb2 import InferParameter, ModelInferRequest
from serve.client.channel import MAX_MESSAGE_BYTES
from serve.client.errors import InferenceClientError, InvalidRequest
from serve.client.tensors import Array, as_input, datatype_named
from serve.protocol.raw_tensors import from_raw, to_raw

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelInferResponse, ModelMetadataResponse

Parameter = bool | int | float | str


def infer_request(
    metadata: ModelMetadataResponse,
    inputs: Mapping[str, Any],
    *,
    version: str = "",
    outputs: Sequence[str] | None = None,
    request_id: str = "",
    parameters: Mapping[str, Parameter] | None = None,
) -> ModelInferRequest:
    """Build a request whose tensors travel raw.

    Args:
        metadata: the model's, for the datatypes of its inputs.
        inputs: name -> array, list, number or string; see `serve.client.tensors.as_input`.
        version: empty for the one that the model's policy chooses.
        outputs: the names wanted; None for all.
        request_id: returned by the server unchanged.
        parameters: request parameters such as {"priority": 1}.

    Raises:
        InvalidRequest: an input is unknown or does not fit, a parameter has no place in the protocol, or the message would pass
            protobuf's limit of 2^31 - 1 bytes.
    """
    request = ModelInferRequest(model_name=metadata.name, model_version=version, id=request_id)
    tensors = {tensor.name: tensor for tensor in metadata.inputs}
    for name, value in inputs.items():
        if name not in tensors:
            raise InvalidRequest(f"model {metadata.name!r} has no input {name!r}; its inputs are: {', '.join(tensors)}")
        datatype = datatype_named(tensors[name].datatype)
        array = as_input(value, datatype, f"input {name!r} of model {metadata.name!r}")
        request.inputs.add(name=name, datatype=datatype.wire, shape=array.shape)
        request.raw_input_contents.append(to_raw(array, datatype))
    for name in outputs or ():
        request.outputs.add(name=name)
    for key, parameter in (parameters or {}).items():
        request.parameters[key].CopyFrom(_parameter(key, parameter))
    size = sum(map(len, request.raw_input_contents))
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the inputs have {size} bytes, expected at most {MAX_MESSAGE_BYTES} in one message; split them")
    return request


def output_arrays(response: ModelInferResponse) -> dict[str, Array]:
    """The outputs by name, in the server's order.

    Returns:
        Arrays that belong to the caller and can be written to. BF16 comes as uint16 bit patterns, BYTES as an object array of
        `bytes`.

    Raises:
        InferenceClientError: the response contradicts itself (code "INTERNAL").
    """
    if len(response.outputs) != len(response.raw_output_contents):
        counts = f"{len(response.outputs)} outputs with {len(response.raw_output_contents)} raw contents"
        raise InferenceClientError(f"the server answered {counts}, expected one raw content for each output", code="INTERNAL")
    arrays: dict[str, Array] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        try:
            array = from_raw(raw, datatype_named(tensor.datatype), tensor.shape)
        except ValueError as error:
            raise InferenceClientError(f"output {tensor.name!r} of the server's answer {error}", code="INTERNAL") from None
        arrays[tensor.name] = array if array.flags.writeable else array.copy()
    return arrays


def _parameter(key: str, value: Any) -> InferParameter:
    if isinstance(value, bool | np.bool_):
        return InferParameter(bool_param=bool(value))
    if isinstance(value, int | np.integer):
        return _integer_parameter(key, int(value))
    if isinstance(value, float | np.floating):
        return InferParameter(double_param=float(value))
    if isinstance(value, str):
        return InferParameter(string_param=value)
    raise InvalidRequest(f"parameter {key!r} must be a bool, int, float or str, not {type(value).__name__}")


def _integer_parameter(key: str, value: int) -> InferParameter:
    if -(2**63) <= value < 2**63:
        return InferParameter(int64_param=value)
    if 0 <= value < 2**64:
        return InferParameter(uint64_param=value)
    raise InvalidRequest(f"parameter {key!r} must fit 64 bits, not {value}")
