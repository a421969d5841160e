"""The right answers to a ModelInferRequest, derived only from its bytes and the models' interfaces.

Written from the protocol (KServe v2 with Triton's extensions), without any code of the server's own checks. If a message has
several faults, the status of any of them is right; if it has none, the answer's values are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from halfserve.protos.inference_pb2 import ModelInferRequest
from tests.serve.faults.malforming.interfaces import INTERFACES, MAX_BATCH, Array, Interface

OK, INVALID, DEADLINE, NOT_FOUND, UNSUPPORTED = 0, 3, 4, 5, 12
PLACE = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
NAME, SIZE, OFFSET = PLACE
DTYPES: dict[str, np.dtype[Any]] = {"FP16": np.dtype("<f2"), "INT32": np.dtype("<i4"), "BOOL": np.dtype("?")}
# Fields of InferTensorContents by datatype; FP16 has none.
FIELDS = {"INT32": "int_contents", "BOOL": "bool_contents", "BYTES": "bytes_contents"}


class BadBytesError(Exception):
    """The elements do not fit the tensor."""


def from_raw(raw: bytes, wire: str, shape: Sequence[int]) -> Array:
    """Decode little-endian, row-major elements without padding; a BYTES element is its length in four bytes, then its data."""
    count = math.prod(shape)
    if wire == "BYTES":
        return _objects(_texts(raw), shape)
    if len(raw) != count * DTYPES[wire].itemsize:
        raise BadBytesError
    if wire == "BOOL":
        return np.frombuffer(raw, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(raw, DTYPES[wire]).reshape(shape)


def from_contents(contents: Any, wire: str, shape: Sequence[int]) -> Array:
    """Decode single elements, which must be in the field of their datatype only."""
    field = FIELDS.get(wire)
    filled = {descriptor.name for descriptor, _ in contents.ListFields()}
    values = list(getattr(contents, field)) if field else []
    if field is None or filled - {field} or len(values) != math.prod(shape):
        raise BadBytesError
    if wire == "BYTES":
        return _objects(values, shape)
    return np.array(values, DTYPES[wire]).reshape(shape)


def is_same(given: bytes, wire: str, expected: Array) -> bool:
    """Whether raw bytes encode these elements; all NaN count as equal."""
    try:
        array = from_raw(given, wire, expected.shape)
    except BadBytesError:
        return False
    if wire == "FP16":
        return bool(np.array_equal(array, expected, equal_nan=True))
    return bool(np.array_equal(array, expected))


def _texts(raw: bytes) -> list[bytes]:
    found, position = [], 0
    while position < len(raw):
        end = position + 4 + int.from_bytes(raw[position : position + 4], "little")
        if position + 4 > len(raw) or end > len(raw):
            raise BadBytesError
        found.append(raw[position + 4 : end])
        position = end
    return found


def _objects(values: Sequence[bytes], shape: Sequence[int]) -> Array:
    """BYTES elements for an ONNX model, whose strings are UTF-8 (onnx.proto, TensorProto.string_data)."""
    if len(values) != math.prod(shape):
        raise BadBytesError
    try:
        for value in values:
            value.decode()
    except UnicodeDecodeError:
        raise BadBytesError from None
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


@dataclass(frozen=True)
class Due:
    codes: frozenset[int]  # right gRPC statuses; OK, alone or among others, if it may be answered
    outputs: dict[str, Array] | None = None  # expected outputs in order; None if they are not predictable
    id: str = ""


def due(data: bytes) -> Due:
    """The allowed answers to the request in these bytes, which may be invalid."""
    try:
        request = ModelInferRequest.FromString(data)
    except DecodeError:
        return Due(frozenset({INVALID}))
    faults = set(_model_faults(request))
    interface = INTERFACES.get(request.model_name)
    if interface is None:
        return Due(frozenset(faults))
    late = {DEADLINE} if "timeout" in request.parameters and _whole(request.parameters["timeout"]) else set()
    faults |= set(_parameter_faults(request)) | set(_output_faults(request, interface))
    arrays: dict[str, Array] = {}
    faults |= set(_input_faults(request, interface, arrays))
    if faults:
        return Due(frozenset(faults))
    return Due(frozenset({OK} | late), _answer(request, interface, arrays), request.id)


def _model_faults(request: ModelInferRequest) -> Iterator[int]:
    if request.model_name not in INTERFACES:
        yield NOT_FOUND
    version = request.model_version
    if version and not (version.isascii() and version.isdigit()):
        yield INVALID
    elif version and version.lstrip("0") != "1":
        yield NOT_FOUND


def _parameter_faults(request: ModelInferRequest) -> Iterator[int]:
    for name in ("priority", "timeout"):
        if name in request.parameters and _whole(request.parameters[name]) is None:
            yield INVALID


def _output_faults(request: ModelInferRequest, interface: Interface) -> Iterator[int]:
    names = {output.name for output in request.outputs}
    ways = {output.SerializeToString(deterministic=True) for output in request.outputs}
    if len(ways) != len(names) or not names <= interface.outputs.keys():  # an output may be requested twice
        yield INVALID
    for output in request.outputs:
        yield from _place_faults(output.parameters)
        if "classification" in output.parameters:
            classes = _whole(output.parameters["classification"])
            if classes is None or interface.outputs.get(output.name) == "BYTES":
                yield INVALID


def _input_faults(request: ModelInferRequest, interface: Interface, arrays: dict[str, Array]) -> Iterator[int]:
    raw = request.raw_input_contents
    if raw and len(raw) != sum(not _names_place(tensor.parameters) for tensor in request.inputs):
        yield INVALID
    entries = iter(raw)
    for tensor in request.inputs:
        if _names_place(tensor.parameters):
            yield from _place_faults(tensor.parameters)
            continue
        entry = next(entries, None)
        if _is_unfit(tensor, interface, entry, arrays, any_raw=bool(raw)):
            yield INVALID
    if arrays.keys() != interface.inputs.keys():
        yield INVALID
    rows = {array.shape[0] for array in arrays.values() if array.ndim}
    if len(rows) > 1 or not all(1 <= count <= MAX_BATCH for count in rows):
        yield INVALID


def _is_unfit(tensor: Any, interface: Interface, entry: bytes | None, arrays: dict[str, Array], *, any_raw: bool) -> bool:
    """Whether an input that is sent does not fit; one that fits is added to `arrays`."""
    if tensor.name not in interface.inputs or tensor.name in arrays:
        return True
    wire, expected = interface.inputs[tensor.name]
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(
        size >= 0 and want in {-1, size} for size, want in zip(shape, expected, strict=True)
    )
    if tensor.datatype != wire or not fits or (any_raw and (entry is None or tensor.HasField("contents"))):
        return True
    try:
        if any_raw:
            arrays[tensor.name] = from_raw(entry or b"", wire, shape)
        else:
            arrays[tensor.name] = from_contents(tensor.contents, wire, shape)
    except (BadBytesError, ValueError):  # raised by numpy for sizes whose product overflows, beside a size of 0
        return True
    return False


def _names_place(parameters: Any) -> bool:
    return any(name in parameters for name in PLACE)


def _place_faults(parameters: Any) -> Iterator[int]:
    """Faults of a tensor in shared memory, which is switched off."""
    if not _names_place(parameters):
        return
    yield UNSUPPORTED
    wrong = NAME not in parameters or SIZE not in parameters
    wrong = wrong or parameters[NAME].WhichOneof("parameter_choice") != "string_param" or not parameters[NAME].string_param
    if wrong or any(_whole(parameters[name]) is None for name in (SIZE, OFFSET) if name in parameters):
        yield INVALID


def _whole(parameter: Any) -> int | None:
    """A parameter's whole number of 0 or more; None if it has none."""
    choice = parameter.WhichOneof("parameter_choice")
    number = getattr(parameter, choice) if choice in {"int64_param", "uint64_param"} else -1
    return number if number >= 0 else None


def _answer(request: ModelInferRequest, interface: Interface, arrays: dict[str, Array]) -> dict[str, Array] | None:
    if any("classification" in output.parameters for output in request.outputs):
        return None
    outputs = interface.answer(arrays)
    names = [output.name for output in request.outputs] or list(interface.outputs)
    return {name: np.asarray(outputs[name]) for name in names}
