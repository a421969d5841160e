"""Conversion of named arrays to ModelInferRequest, and of ModelInferResponse to named arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.protos.inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    ModelStreamInferResponse,
)
from halfserve.protos.request_parameters import PRIORITY, SEQUENCE_ID, TIMEOUT
from halfserve.serve.client.array_conversion import (
    Array,
    as_bfloat16,
    as_input,
    check_shape,
    converted,
    datatype_named,
    to_wire,
)
from halfserve.serve.client.channel_settings import MAX_MESSAGE_BYTES
from halfserve.serve.client.errors import ClientError, InvalidRequest, check_text, is_above_0
from halfserve.serve.protocol.messages import put_request, split_response, split_stream_response
from halfserve.serve.protocol.raw_tensors import from_raw, raw_view

Parameter = bool | int | float | str
Raw = bytes | memoryview
MICROSECONDS = 1_000_000
LARGE_BYTES = 2**16  # size from which protobuf's copies of tensors take longer than splitting or joining a message here
REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"


def add_parameters(
    request: ModelInferRequest, parameters: Mapping[str, Parameter] | None, *, priority: int, queue_timeout_s: float | None
) -> None:
    """Write a request's parameters. Raises InvalidRequest: the protocol cannot carry a value, or a value is out of range."""
    for key, value in (parameters or {}).items():
        check_text(key, "a parameter's name")
        request.parameters[key].CopyFrom(_parameter(key, value))
    if priority:
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 < priority < 2**32:
            raise InvalidRequest(f"priority must be a whole number, 1 for the most urgent, not {priority!r}")
        request.parameters[PRIORITY].int64_param = priority
    if queue_timeout_s is not None:
        if not is_above_0(queue_timeout_s) or not queue_timeout_s < 2**43:
            raise InvalidRequest(f"queue_timeout_s must be seconds above 0, or None, not {queue_timeout_s!r}")
        request.parameters[TIMEOUT].int64_param = max(1, round(queue_timeout_s * MICROSECONDS))


def is_stateful(request: ModelInferRequest) -> bool:
    """Return whether the request belongs to a sequence, in which each step changes the model's state."""
    return SEQUENCE_ID in request.parameters


def values_of(parameters: Mapping[str, InferParameter]) -> dict[str, Parameter]:
    """Return the values of a map of parameters; empty ones and those of unknown kinds are left out."""
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


@dataclass(frozen=True, kw_only=True)
class SharedSlice:
    """Location of one tensor's bytes in shared memory."""

    region: str  # name under which the region is registered
    offset: int  # offset from the region's start in bytes
    byte_size: int  # size of the tensor, or of the space for it

    def write_to(self, parameters: Any) -> None:
        parameters[REGION].string_param = self.region
        parameters[SIZE].int64_param = self.byte_size
        if self.offset:
            parameters[OFFSET].int64_param = self.offset


# Finds the location of an input in shared memory; returns None for an input that is sent.
FindPlace = Callable[[str, Array], SharedSlice | None]


def check_named(inputs: object) -> None:
    if not isinstance(inputs, Mapping):
        raise InvalidRequest(f"inputs must be arrays by name, such as {{'x': array}}, not {type(inputs).__name__}")


def check_outputs(metadata: ModelMetadataResponse, names: Iterable[str]) -> None:
    """Refuse names that are not outputs of the model.
    Raises InvalidRequest: a name is not an output; the text lists the model's outputs.
    """
    known = [tensor.name for tensor in metadata.outputs]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"model {metadata.name!r} has no output {name!r}; its outputs are: {', '.join(known)}")


def infer_request(metadata: ModelMetadataResponse, inputs: Mapping[str, Any], **options: Any) -> ModelInferRequest:
    """Build a complete request; arguments and errors are those of `request_parts`."""
    request, raw = request_parts(metadata, inputs, **options)
    request.raw_input_contents.extend(map(bytes, raw))
    return request


def request_parts(
    metadata: ModelMetadataResponse,
    inputs: Mapping[str, Any],
    *,
    version: str = "",
    outputs: Sequence[str] | None = None,
    request_id: str = "",
    parameters: Mapping[str, Parameter] | None = None,
    priority: int = 0,
    queue_timeout_s: float | None = None,
    top_k: int | Mapping[str, int] | None = None,
    cast: bool = False,
    find_place: FindPlace | None = None,
    into: Mapping[str, SharedSlice] | None = None,
) -> tuple[ModelInferRequest, list[Raw]]:
    """Build a request without its raw contents, and these, where large ones are views of the arrays.

    See `RequestOptions` for the options.

    `find_place` finds the location of an input in shared memory (None sends all inputs), `into` has the locations for outputs,
    by output name.

    Raises:
        InvalidRequest: an input or output is unknown, an input does not fit, the protocol cannot carry a parameter, or
            the message would exceed protobuf's limit of 2^31 - 1 bytes.
    """
    check_named(inputs)
    check_text(request_id, "request_id")
    request = ModelInferRequest(model_name=metadata.name, model_version=version, id=request_id)
    raw: list[Raw] = []
    tensors = {tensor.name: tensor for tensor in metadata.inputs}
    for name, value in inputs.items():
        if name not in tensors:
            raise InvalidRequest(f"model {metadata.name!r} has no input {name!r}; its inputs are: {', '.join(tensors)}")
        where, datatype = f"input {name!r} of model {metadata.name!r}", datatype_named(tensors[name].datatype)
        array = (converted if cast else as_input)(value, datatype, where)
        check_shape(array.shape, tensors[name].shape, where)
        tensor = request.inputs.add(name=name, datatype=datatype.wire, shape=array.shape)
        place = None if find_place is None else find_place(name, array)
        if place is None:
            raw.append(raw_view(array, datatype) if array.nbytes >= LARGE_BYTES else to_wire(array, datatype))
        else:
            place.write_to(tensor.parameters)
    _add_outputs(request, metadata, outputs, top_k, into or {})
    add_parameters(request, parameters, priority=priority, queue_timeout_s=queue_timeout_s)
    size = sum(map(len, raw))
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the inputs have {size} bytes, expected at most {MAX_MESSAGE_BYTES} in one message; split them")
    return request, raw


def serialized_request(request: ModelInferRequest, raw: Sequence[Raw]) -> bytes:
    """Serialize a request and its raw contents, which the message takes in if they are small."""
    if sum(map(len, raw)) >= LARGE_BYTES:
        return put_request(request.SerializeToString(), raw)
    request.raw_input_contents.extend(map(bytes, raw))
    return request.SerializeToString()


class LargeResponse:
    """A ModelInferResponse whose raw contents are views of the received bytes; it has the fields of the message."""

    def __init__(self, data: bytes, head: bytes, raw: list[memoryview]) -> None:
        """`data`: the received message; `head`: the response without its raw contents."""
        message = ModelInferResponse.FromString(head)
        self.data = data
        self.model_name = message.model_name
        self.model_version = message.model_version
        self.id = message.id
        self.parameters = message.parameters
        self.outputs = message.outputs
        self.raw_output_contents: Sequence[Raw] = raw


InferResponse = ModelInferResponse | LargeResponse


def received_response(data: bytes) -> InferResponse:
    """Parse a ModelInferResponse. Raises DecodeError: it is malformed."""
    return _large_response(data, split_response) or ModelInferResponse.FromString(data)


def received_stream_response(data: bytes) -> ModelStreamInferResponse | LargeResponse:
    """Parse a ModelStreamInferResponse, which has no error if it is large. Raises DecodeError: it is malformed."""
    return _large_response(data, split_stream_response) or ModelStreamInferResponse.FromString(data)


def _large_response(data: bytes, split: Callable[[bytes], tuple[bytes, list[memoryview]]]) -> LargeResponse | None:
    if len(data) < LARGE_BYTES:
        return None
    try:
        return LargeResponse(data, *split(data))
    except IndexError:
        return None


def check_answer(response: InferResponse, wanted: Collection[str], request_id: str = "") -> None:
    """Refuse an answer that has another id than the request, lacks one of the `wanted` outputs, or has an output twice.

    The answer may have further outputs, and some servers do not return the id. Raises ClientError (code "INTERNAL").
    """
    if request_id and response.id not in ("", request_id):
        text = f"the server gave the answer to the request {response.id!r}, expected that to {request_id!r}"
        raise ClientError(text, code="INTERNAL")
    counts = Counter(tensor.name for tensor in response.outputs)
    wrong = next((name for name in (*wanted, *counts) if counts[name] != 1), None)
    if wrong is not None:
        text = f"the server's answer has {counts[wrong]} outputs {wrong!r}, expected one; its outputs are: {', '.join(counts)}"
        raise ClientError(text, code="INTERNAL")


def output_arrays(response: InferResponse, elsewhere: Collection[str] = ()) -> dict[str, Array]:
    """Return the outputs by name, in the server's order, as writeable arrays of the caller; those in shared memory are left
    out.

    BF16 comes as `ml_dtypes.bfloat16`, BYTES as an object array of `bytes`. `elsewhere` names the outputs requested in shared
    memory: some servers do not say in the response that they are there. Raises ClientError: the response contradicts itself
    (code "INTERNAL").
    """
    if len(response.outputs) != len(response.raw_output_contents):
        counts = f"{len(response.outputs)} outputs with {len(response.raw_output_contents)} raw contents"
        raise ClientError(f"the server answered {counts}, expected one raw content for each output", code="INTERNAL")
    arrays: dict[str, Array] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if raw or not (tensor.name in elsewhere or REGION in tensor.parameters):
            array = array_of(tensor, raw)
            arrays[tensor.name] = array if array.flags.writeable else array.copy()
    return arrays


def array_of(tensor: ModelInferResponse.InferOutputTensor, raw: Raw) -> Array:
    """View one output's bytes as an array. Raises ClientError: the bytes do not fit the shape (code "INTERNAL")."""
    datatype = datatype_named(tensor.datatype)
    try:
        array = from_raw(raw, datatype, tensor.shape)
    except ValueError as error:
        raise ClientError(f"output {tensor.name!r} of the server's answer {error}", code="INTERNAL") from None
    return as_bfloat16(array) if datatype.wire == "BF16" else array


def _add_outputs(
    request: ModelInferRequest,
    metadata: ModelMetadataResponse,
    outputs: Sequence[str] | None,
    top_k: int | Mapping[str, int] | None,
    into: Mapping[str, SharedSlice],
) -> None:
    if outputs is None and top_k is None and not into:
        return
    names = [tensor.name for tensor in metadata.outputs] if outputs is None else list(outputs)
    classes = top_k if isinstance(top_k, Mapping) else dict.fromkeys(names, top_k)
    check_outputs(metadata, [*names, *classes, *into])
    left_out = next((name for name in (*classes, *into) if name not in names), None)
    if left_out is not None:
        raise InvalidRequest(f"output {left_out!r} stands in top_k or into, but not in outputs: {', '.join(names)}")
    for name in names:
        parameters = request.outputs.add(name=name).parameters
        count = classes.get(name)
        if count is not None:
            if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 2**31:
                raise InvalidRequest(f"top_k of output {name!r} must be a whole number above 0, not {count!r}")
            parameters["classification"].int64_param = count
        if name in into:
            into[name].write_to(parameters)


@dataclass(frozen=True, kw_only=True)
class InferAnswer:
    """Result of `Client.infer_detailed`.

    Attributes:
        model: name of the model that answered.
        version: version of the model that answered.
        request_id: id of the request.
        parameters: parameters of the response, such as the actions of the precision guard.
        outputs: name -> array, as `Client.infer` returns them.
    """

    model: str
    version: str
    request_id: str
    parameters: Mapping[str, Parameter]
    outputs: dict[str, Array]


def answer_of(response: InferResponse, outputs: dict[str, Array]) -> InferAnswer:
    return InferAnswer(
        model=response.model_name,
        version=response.model_version,
        request_id=response.id,
        parameters=values_of(response.parameters),
        outputs=outputs,
    )
