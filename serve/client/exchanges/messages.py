"""ModelInferRequest from named arrays, named arrays from ModelInferResponse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from protos.inference_pb2 import ModelInferRequest
from serve.client.checks import check_named, check_outputs, check_shape, check_text
from serve.client.connection.channel import MAX_MESSAGE_BYTES
from serve.client.errors import InferenceClientError, InvalidRequest
from serve.client.values.parameters import Parameter, add_parameters
from serve.client.values.places import REGION, FindPlace, Place
from serve.client.values.tensors import Array, as_bfloat16, as_input, converted, datatype_named, to_wire
from serve.protocol.raw_tensors import from_raw

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelInferResponse, ModelMetadataResponse


def infer_request(
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
    into: Mapping[str, Place] | None = None,
) -> ModelInferRequest:
    """Build a request whose tensors travel raw.

    Args:
        metadata: the model's, for the names, datatypes and shapes of its inputs.
        inputs: name -> array, list, number or string; see `serve.client.values.tensors.as_input`.
        version: empty for the one that the model's policy chooses.
        outputs: see `serve.client.options.RequestOptions`, as the next ones to `cast`.
        request_id: returned by the server unchanged.
        parameters: request parameters.
        priority: 1 is the most urgent.
        queue_timeout_s: seconds.
        top_k: how many classes to name.
        cast: whether arrays of another dtype are converted.
        find_place: tells which inputs lie in shared memory.
        into: places in shared memory for outputs, by name.

    Raises:
        InvalidRequest: an input or output is unknown, an input does not fit, a parameter has no place in the protocol, or the
            message would pass protobuf's limit of 2^31 - 1 bytes.
    """
    check_named(inputs)
    check_text(request_id, "request_id")
    request = ModelInferRequest(model_name=metadata.name, model_version=version, id=request_id)
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
            request.raw_input_contents.append(to_wire(array, datatype))
        else:
            place.write_to(tensor.parameters)
    _add_outputs(request, metadata, outputs, top_k, into or {})
    add_parameters(request, parameters, priority=priority, queue_timeout_s=queue_timeout_s)
    size = sum(map(len, request.raw_input_contents))
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the inputs have {size} bytes, expected at most {MAX_MESSAGE_BYTES} in one message; split them")
    return request


def check_answer(response: ModelInferResponse, wanted: Collection[str], request_id: str = "") -> None:
    """Refuse an answer that is not to the request.

    Args:
        response: the server's.
        wanted: names of outputs that were asked for; others may be there, or not.
        request_id: of the request, empty for none. Not every server says it again.

    Raises:
        InferenceClientError: it has another id, lacks an output, or has one twice (code "INTERNAL").
    """
    if request_id and response.id not in ("", request_id):
        text = f"the server gave the answer to the request {response.id!r}, expected that to {request_id!r}"
        raise InferenceClientError(text, code="INTERNAL")
    counts = Counter(tensor.name for tensor in response.outputs)
    wrong = next((name for name in (*wanted, *counts) if counts[name] != 1), None)
    if wrong is not None:
        text = f"the server's answer has {counts[wrong]} outputs {wrong!r}, expected one; its outputs are: {', '.join(counts)}"
        raise InferenceClientError(text, code="INTERNAL")


def output_arrays(response: ModelInferResponse, elsewhere: Collection[str] = ()) -> dict[str, Array]:
    """The outputs by name, in the server's order.

    Args:
        response: the server's.
        elsewhere: names of outputs that were wanted in shared memory. Not every server says again that they lie there.

    Returns:
        Arrays that belong to the caller and can be written to. BF16 comes as `ml_dtypes.bfloat16`, BYTES as an object array of
        `bytes`. An output in shared memory is not among them.

    Raises:
        InferenceClientError: the response contradicts itself (code "INTERNAL").
    """
    if len(response.outputs) != len(response.raw_output_contents):
        counts = f"{len(response.outputs)} outputs with {len(response.raw_output_contents)} raw contents"
        raise InferenceClientError(f"the server answered {counts}, expected one raw content for each output", code="INTERNAL")
    arrays: dict[str, Array] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if raw or not (tensor.name in elsewhere or REGION in tensor.parameters):
            array = array_of(tensor, raw)
            arrays[tensor.name] = array if array.flags.writeable else array.copy()
    return arrays


def array_of(tensor: ModelInferResponse.InferOutputTensor, raw: bytes | memoryview) -> Array:
    """A view of one output's bytes.

    Raises:
        InferenceClientError: they do not fit the shape (code "INTERNAL").
    """
    datatype = datatype_named(tensor.datatype)
    try:
        array = from_raw(raw, datatype, tensor.shape)
    except ValueError as error:
        raise InferenceClientError(f"output {tensor.name!r} of the server's answer {error}", code="INTERNAL") from None
    return as_bfloat16(array) if datatype.wire == "BF16" else array


def _add_outputs(
    request: ModelInferRequest,
    metadata: ModelMetadataResponse,
    outputs: Sequence[str] | None,
    top_k: int | Mapping[str, int] | None,
    into: Mapping[str, Place],
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
