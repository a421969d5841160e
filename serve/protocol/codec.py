"""Decodes the parameters, tensors and requested outputs of a ModelInferRequest, and checks them against the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from halfserve.protos.datatypes import BY_WIRE, Datatype
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.protos.request_parameters import PRIORITY, REQUEST_PARAMETERS, RESERVED_PREFIX, TIMEOUT, TIMINGS
from halfserve.protos.shared_memory_parameters import PARAMETERS
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import ByteCountError, InvalidArgumentError
from halfserve.serve.engine.model import Model, missing_inputs, unfit_shape
from halfserve.serve.engine.pictures.encoded_inputs import EncodedInputs, EncodedPictures
from halfserve.serve.engine.requests import NO_PARAMETERS, Parameter
from halfserve.serve.engine.tensors import ANY_SIZE, Array, LateArray, LateInputs, RawInput, RawLayout, Tensors, TensorSpec
from halfserve.serve.protocol.messages import parse
from halfserve.serve.protocol.raw_tensors import from_raw
from halfserve.serve.protocol.shared_memory import (
    MAX_BYTES,
    RegionSlice,
    SharedMemory,
    check_size,
    read_tensor,
    slice_of,
    whole_number,
)

BYTES: Final = BY_WIRE["BYTES"]
CLASSIFICATION: Final = "classification"
# Typed contents whose packed encoding is the array's memory. Element by element a batch of images takes 0.25 s.
LIKE_RAW = frozenset({"bool_contents", "fp32_contents", "fp64_contents"})
# From this many bytes of a BYTES input, or elements of typed contents, on, decoding (0.05 to 0.25 us each) is left to the
# thread that runs the model.
LATE_BYTES: Final = 2**14
LATE_ELEMENTS: Final = 2**12
PIECE: Final = 4096  # elements per assignment; the GIL is held during each


@dataclass(frozen=True)
class DecodedInputs:
    """The decoded tensors of a request, and its batch size."""

    inputs: Tensors  # read-only views on the received bytes where possible; slow or shared-memory tensors are read on first use
    rows: int  # size of the batch dimension; 1 for a model without one
    bucket: Hashable  # equal for requests whose shapes differ at most in the batch dimension


@dataclass(frozen=True, kw_only=True)
class RequestedOutput:
    """An output that is written to shared memory, classified, or both."""

    place: RegionSlice | None  # its shared memory slice; None to send it
    classes: int | None  # number of best classes to name; None to answer the numbers


def parameters_of_request(request: ModelInferRequest) -> Mapping[str, Parameter]:
    """Return the request's parameters by name; one without a value is left out.

    Raises:
        InvalidArgumentError: a parameter's name has the prefix that is reserved for the server.
    """
    for name in request.parameters:
        if name.startswith(RESERVED_PREFIX) and name not in REQUEST_PARAMETERS:
            raise InvalidArgumentError(
                f"parameter {name!r:.60} begins with {RESERVED_PREFIX!r}, which is reserved for the server; "
                "expected another name"
            )
    given = {name: parameter.WhichOneof("parameter_choice") for name, parameter in request.parameters.items()}
    return {name: getattr(request.parameters[name], kind) for name, kind in given.items() if kind} or NO_PARAMETERS


def priority_of(request: ModelInferRequest) -> int:
    """Return the request parameter `priority`; 0 if it is absent."""
    return _whole_parameter(request, PRIORITY)


def queue_timeout_s(request: ModelInferRequest) -> float | None:
    """Return the request parameter `timeout`, in seconds; None if it is absent or 0."""
    return _whole_parameter(request, TIMEOUT) / 1e6 or None


def wants_timings(request: ModelInferRequest) -> bool:
    """Return the request parameter `halfserve.timings`; False if it is absent.

    Raises:
        InvalidArgumentError: it is neither true nor false.
    """
    given = request.parameters.get(TIMINGS)
    if given is None:
        return False
    if given.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidArgumentError(f"parameter {TIMINGS!r} is no bool, expected {REQUEST_PARAMETERS[TIMINGS].values}")
    return bool(given.bool_param)


def _whole_parameter(request: ModelInferRequest, name: str) -> int:
    given = request.parameters.get(name)
    return 0 if given is None else whole_number(given, f"parameter {name!r}", REQUEST_PARAMETERS[name].values)


def decode_inputs(
    request: ModelInferRequest, model: Model, memory: SharedMemory, data: bytes = b"", client: Callable[[], str] | None = None
) -> DecodedInputs:
    """Check every input against the model and view its bytes as an array. Tensors that are read later may still be wrong.

    Encoded pictures are read from the message `data` again later, and belong to the client that `client` names.

    Raises:
        InvalidArgumentError: a name, datatype, shape, row or byte count is wrong; the text names the input and both values.
        NotFoundError: an input's shared memory region is not registered.
        UnsupportedError: an input lies in shared memory, which is off.
    """
    raw = request.raw_input_contents
    places = input_slices(request)
    sent = places.count(None)
    if raw and len(raw) != sent:
        raise InvalidArgumentError(f"raw_input_contents has {len(raw)} entries, expected {sent}, one per input that is sent")
    entries = iter(raw)
    arrays: dict[str, Array | LateArray] = {}
    pictures: EncodedPictures | None = None
    for tensor, place in zip(request.inputs, places, strict=True):
        spec = _spec(tensor, model, arrays)
        if (raw or place is not None) and tensor.HasField("contents"):
            other = "a raw_input_contents entry" if place is None else "a place in shared memory"
            raise InvalidArgumentError(f"input {spec.name!r} has contents and {other}, expected one of them")
        try:
            if place is not None:
                array: Array | LateArray = _from_shared(memory, place, spec, tensor.shape)
            elif raw:
                array = _from_raw(next(entries), spec, tensor.shape)
            else:
                array = _from_contents(tensor.contents, spec, tensor.shape)
        except ValueError as error:
            raise _wrong(spec, error, model) from None
        if spec.datatype is not model.inputs[spec.name].datatype:
            if place is None and len(data) > LATE_BYTES:
                array = _late(spec, tensor.shape, partial(_read_again, data, len(arrays), spec, tuple(tensor.shape)))
            pictures = _encoded_pictures(spec.name, array, model, client)
            array = LateArray(pictures.shape, _undecoded)
        arrays[spec.name] = array
    if len(arrays) != len(model.inputs) and (left_out := _left_out(arrays, model)):
        missing = ", ".join(map(repr, left_out))
        text = f"missing input {missing}; the model takes {_names(model.inputs)}"
        raise missing_inputs(text, model, [*arrays], left_out)
    _check_total(places)
    rows = model.rows_of({name: array.shape for name, array in arrays.items()})
    arrays = {name: _to_model(array, model.inputs[name]) for name, array in arrays.items()}
    inputs = _inputs(arrays) if pictures is None else EncodedInputs(pictures, arrays)
    return DecodedInputs(inputs, rows, model.bucket({name: array.shape for name, array in arrays.items()}))


def raw_layout(request: ModelInferRequest, model: Model) -> RawLayout | None:
    """Return the layout of the raw contents that all requests like this checked one have; None if each must be parsed.

    A request must be parsed if its elements have no fixed size, if their bytes need a check (BOOL), or if its inputs have
    parameters other than those of shared memory.
    """
    sent = [tensor for tensor in request.inputs if not tensor.parameters]
    if not request.inputs or len(request.raw_input_contents) != len(sent):
        return None
    inputs = []
    for tensor in request.inputs:
        spec = model.inputs[tensor.name]
        dtype = spec.datatype.array_dtype
        if tensor.datatype != spec.datatype.wire:  # encoded pictures
            return None
        if not PARAMETERS.issuperset(tensor.parameters) or dtype.hasobject or dtype == np.bool_:
            return None
        elements = math.prod(tensor.shape)
        shape = spec.shape_for_model(tuple(tensor.shape))
        inputs.append(RawInput(spec.name, dtype, shape, elements, elements * dtype.itemsize))
    return RawLayout(tuple(inputs))


def input_slices(request: ModelInferRequest) -> list[RegionSlice | None]:
    """Return the shared memory slice of each input; None for an input whose bytes are in the request."""
    return [slice_of(f"input {tensor.name!r}", tensor.parameters) if tensor.parameters else None for tensor in request.inputs]


def requested_names(request: ModelInferRequest, model: Model) -> tuple[str, ...]:
    """Return the outputs to send, in the client's order; all outputs if it names none. Duplicates are sent once.

    Raises:
        InvalidArgumentError: the model has no such output, or an output is requested in two ways.
    """
    if not request.outputs:
        return tuple(model.outputs)
    wanted: dict[str, ModelInferRequest.InferRequestedOutputTensor] = {}
    for output in request.outputs:
        name = output.name
        if name not in model.outputs:
            known = ", ".join(map(repr, model.outputs))
            text = f"output {name!r} is not one of the model's: {known}"
            raise InvalidArgumentError(text).like(TritonPhrase.UNEXPECTED_OUTPUT, output=name, model=model.name)
        if wanted.setdefault(name, output) != output:
            raise InvalidArgumentError(f"output {name!r} is named twice, with other parameters; expected one way to answer it")
    return tuple(wanted)


def special_outputs(request: ModelInferRequest, model: Model, memory: SharedMemory) -> dict[str, RequestedOutput]:
    """Return the outputs of a checked request that are not simply sent, by name.

    Raises:
        InferenceError: a parameter or a slice is invalid (see `SharedMemory.check`).
    """
    wanted = {}
    for output in request.outputs:
        if not output.parameters:
            continue
        what = f"output {output.name!r}"
        place, classes = slice_of(what, output.parameters), _classes(what, output.parameters)
        if classes is not None and model.outputs[output.name].datatype is BYTES:
            raise InvalidArgumentError(
                f"{what} has datatype BYTES, expected numbers to classify by; leave {CLASSIFICATION} out"
            )
        if place is not None:
            memory.check(place)
        if place is not None or classes is not None:
            wanted[output.name] = RequestedOutput(place=place, classes=classes)
    return wanted


def _classes(what: str, parameters: Any) -> int | None:
    if CLASSIFICATION not in parameters:
        return None
    count = whole_number(parameters[CLASSIFICATION], f"{what}: parameter {CLASSIFICATION}", "how many classes to name")
    return count or None  # 0 means none


def _check_total(places: Sequence[RegionSlice | None]) -> None:
    total = sum(place.byte_size for place in places if place is not None)
    if total > MAX_BYTES:
        raise InvalidArgumentError(
            f"the inputs in shared memory have {total} bytes, expected at most {MAX_BYTES}, as in a message; split the request"
        )


def _spec(tensor: ModelInferRequest.InferInputTensor, model: Model, seen: Mapping[str, Any]) -> TensorSpec:
    spec = model.inputs.get(tensor.name)
    if spec is None:
        text = f"input {tensor.name!r} is not one of the model's: {_names(model.inputs)}"
        raise InvalidArgumentError(text).like(TritonPhrase.UNEXPECTED_INPUT, input=tensor.name, model=model.name)
    if spec.name in seen:
        raise InvalidArgumentError(f"input {spec.name!r} is given twice; expected once")
    if tensor.datatype != spec.datatype.wire:
        if tensor.datatype == BYTES.wire and spec.name in model.pictures:
            spec = _encoded_spec(spec, len(tensor.shape))
        else:
            expected = spec.datatype.wire
            text = f"input {spec.name!r} has datatype {tensor.datatype!r}, expected {expected!r}"
            facts = {"input": spec.name, "model": model.name, "given": tensor.datatype, "expected": expected}
            raise InvalidArgumentError(text).like(TritonPhrase.DATATYPE, **facts)
    mismatch = spec.mismatch(tensor.shape)
    if mismatch is not None:
        raise unfit_shape(f"input {spec.name!r} {mismatch}", model, spec, tensor.shape)
    return spec


def _left_out(given: Mapping[str, object], model: Model) -> list[str]:
    return [name for name, spec in model.inputs.items() if name not in given and not spec.optional]


def _from_raw(raw: bytes | memoryview, spec: TensorSpec, shape: Sequence[int]) -> Array | LateArray:
    datatype = spec.datatype
    if datatype.itemsize is None and len(raw) > LATE_BYTES:
        return _late(spec, shape, partial(from_raw, raw, datatype, tuple(shape)))
    array = from_raw(raw, datatype, shape)
    # Backends need numbers, not BF16 bit patterns.
    return array.view(datatype.array_dtype) if datatype.numpy is None else array


def _from_shared(memory: SharedMemory, place: RegionSlice, spec: TensorSpec, shape: Sequence[int]) -> LateArray:
    memory.check(place)
    check_size(place, spec.datatype, shape)
    return _late(spec, shape, partial(read_tensor, memory, place, spec.datatype, tuple(shape), memory.latest))


def _from_contents(contents: Any, spec: TensorSpec, shape: Sequence[int]) -> Array | LateArray:
    datatype = spec.datatype
    if datatype.contents is None:
        raise ValueError(f"of datatype {datatype.wire} has no typed contents, expected its bytes in raw_input_contents")
    values = getattr(contents, datatype.contents)
    filled = [field.name for field, _ in contents.ListFields() if field.name != datatype.contents]
    if filled:
        raise ValueError(f"of datatype {datatype.wire} has its elements in {filled[0]}, expected {datatype.contents}")
    expected = math.prod(shape)
    if len(values) != expected:
        raise ValueError(f"has {len(values)} elements in {datatype.contents}, expected {expected} for shape {list(shape)}")
    if datatype.contents in LIKE_RAW and values:
        contents.DiscardUnknownFields()
        written = memoryview(contents.SerializeToString())  # consists of the tag, the length and the elements
        return from_raw(written[-len(values) * (datatype.itemsize or 1) :], datatype, shape)
    if len(values) > LATE_ELEMENTS:
        return _late(spec, shape, partial(_one_by_one, values, datatype))
    return _one_by_one(values, datatype).reshape(shape)


def _one_by_one(values: Any, datatype: Datatype) -> Array:
    array = np.empty(len(values), datatype.numpy)
    try:
        for at in range(0, len(values), PIECE):
            array[at : at + PIECE] = values[at : at + PIECE]
    except OverflowError:
        raise ValueError(f"has an element in {datatype.contents} outside the range of {datatype.wire}") from None
    return array


def _late(spec: TensorSpec, shape: Sequence[int], read: Callable[[], Array]) -> LateArray:
    def checked() -> Array:
        try:
            return read()
        except ValueError as error:
            raise _wrong(spec, error, None) from None

    return LateArray(tuple(shape), checked)


def _to_model(array: Array | LateArray, spec: TensorSpec) -> Array | LateArray:
    return replace(array, shape=spec.shape_for_model(array.shape)) if isinstance(array, LateArray) else spec.to_model(array)


def _inputs(arrays: Mapping[str, Array | LateArray]) -> Tensors:
    read = {name: array for name, array in arrays.items() if not isinstance(array, LateArray)}
    return read if len(read) == len(arrays) else LateInputs(arrays)


def _wrong(spec: TensorSpec, error: ValueError, model: Model | None) -> InvalidArgumentError:
    refusal = InvalidArgumentError(f"input {spec.name!r} {error}")
    if model is not None and isinstance(error, ByteCountError):
        refusal.like(error.phrase, input=spec.name, model=model.name, given=error.given, expected=error.expected)
    return refusal


def _names(specs: dict[str, TensorSpec]) -> str:
    return ", ".join(map(repr, specs))


def _encoded_spec(spec: TensorSpec, dimensions: int) -> TensorSpec:
    """Return the spec of encoded pictures that an input takes in place of pixels: BYTES of shape [n], or [n, 1]."""
    shape = (ANY_SIZE, 1) if dimensions == 2 else (ANY_SIZE,)
    return TensorSpec(name=spec.name, datatype=BYTES, shape=shape)


def _encoded_pictures(name: str, files: Array | LateArray, model: Model, client: Callable[[], str] | None) -> EncodedPictures:
    preparation = model.pictures[name]
    shape = (files.shape[0], preparation.height, preparation.width, 3)
    return EncodedPictures(
        name=name, files=files, shape=shape, preparation=preparation, client="" if client is None else client()
    )


def _read_again(data: bytes, index: int, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    """Read one BYTES input of a checked message, which is sent with it."""
    request = parse(ModelInferRequest, data)
    if not request.raw_input_contents:
        return _one_by_one(request.inputs[index].contents.bytes_contents, spec.datatype).reshape(shape)
    before = sum(place is None for place in input_slices(request)[:index])
    return from_raw(request.raw_input_contents[before], spec.datatype, shape)


def _undecoded() -> Array:
    """Stand for pixels while shapes are checked; never called."""
    raise NotImplementedError
