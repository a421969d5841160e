"""Tensors of a request that lie in shared memory: the parameters that say where, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from protos.datatypes import Datatype
from serve.engine.errors import InvalidArgumentError
from serve.engine.tensors import Array
from serve.protocol.raw_tensors import LENGTH_PREFIX, LENGTH_PREFIX_BYTES, from_raw
from serve.protocol.shared_memory import Place, SharedMemory

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
PLACE_PARAMETERS = frozenset((REGION, SIZE, OFFSET))
WINDOW_BYTES = 2**16  # of a BYTES tensor that are read beyond the element that is looked for


def place_of(what: str, parameters: Any) -> Place | None:
    """The place that a tensor's parameters name; None where it travels in the message.

    Args:
        what: opens the error's text: "input 'x'".
        parameters: the tensor's map of InferParameter.

    Raises:
        InvalidArgumentError: the parameters are incomplete or of the wrong kind.
    """
    if not parameters or not any(name in parameters for name in (REGION, SIZE, OFFSET)):
        return None
    if REGION not in parameters or SIZE not in parameters:
        missing, there = (REGION, SIZE) if REGION not in parameters else (SIZE, REGION)
        raise InvalidArgumentError(f"{what} has parameter {there} without {missing}; expected both")
    offset = _number(what, OFFSET, parameters[OFFSET]) if OFFSET in parameters else 0
    region = parameters[REGION]
    if not region.string_param:
        raise InvalidArgumentError(f"{what}: parameter {REGION} is no text, expected a region's name")
    return Place(region=region.string_param, offset=offset, byte_size=_number(what, SIZE, parameters[SIZE]))


def tell_place(parameters: Any, place: Place, byte_size: int) -> None:
    """Write into an answer's parameters where `byte_size` bytes of an output were put."""
    parameters[REGION].string_param = place.region
    parameters[SIZE].int64_param = byte_size
    if place.offset:
        parameters[OFFSET].int64_param = place.offset


def check_size(place: Place, datatype: Datatype, shape: Sequence[int]) -> None:
    """Compare a place with the tensor that a request says is there, before a byte of it is read.

    Raises:
        ValueError: the tensor has another size, or, where its elements have none of their own, a greater one.
    """
    elements = math.prod(shape)
    if datatype.itemsize is None:
        expected, words, fits = elements * LENGTH_PREFIX_BYTES, "at least ", elements * LENGTH_PREFIX_BYTES <= place.byte_size
    else:
        expected, words, fits = elements * datatype.itemsize, "", elements * datatype.itemsize == place.byte_size
    if not fits:
        raise ValueError(f"has {place.byte_size} bytes, expected {words}{expected} for {datatype.wire} of shape {list(shape)}")


def read_tensor(memory: SharedMemory, place: Place, datatype: Datatype, shape: Sequence[int], since: int) -> Array:
    """A copy of a tensor whose size has been checked, as `from_raw` gives it. Called on worker threads.

    Raises:
        InferenceError: the region is gone, or has become smaller; `since`: see `SharedMemory.check`.
        ValueError: these are not the elements that the shape says.
    """
    if datatype.itemsize is None:
        return _read_elements(memory, place, shape, since)
    array = from_raw(memory.read(place, since=since).data, datatype, shape)
    return array.view(datatype.array_dtype) if datatype.numpy is None else array


def _read_elements(memory: SharedMemory, place: Place, shape: Sequence[int], since: int) -> Array:
    """BYTES elements. No more is read than they take and a window: the place may be much larger."""
    expected, data, position = math.prod(shape), bytearray(), 0
    elements: list[bytes] = []

    def reach(end: int) -> None:
        if end > place.byte_size:
            raise ValueError(
                f"ends inside BYTES element {len(elements)}, expected a {LENGTH_PREFIX_BYTES}-byte length and as many bytes"
            )
        if (start := len(data)) < end:
            data.extend(bytes(min(place.byte_size, end + WINDOW_BYTES) - start))
            part = Place(region=place.region, offset=place.offset + start, byte_size=len(data) - start)
            memory.read_into(part, memoryview(data)[start:], since=since)

    while len(elements) < expected:
        start = position + LENGTH_PREFIX_BYTES
        reach(start)
        position = start + LENGTH_PREFIX.unpack_from(data, start - LENGTH_PREFIX_BYTES)[0]
        reach(position)
        elements.append(bytes(memoryview(data)[start:position]))
    if position < place.byte_size:
        raise ValueError(f"has more than {expected} BYTES elements, expected {expected} for shape {list(shape)}")
    array = np.empty(expected, object)
    array[:] = elements
    return array.reshape(shape)


def _number(what: str, name: str, parameter: Any) -> int:
    choice = parameter.WhichOneof("parameter_choice")
    number: int = getattr(parameter, choice) if choice in {"int64_param", "uint64_param"} else -1
    if number < 0:
        raise InvalidArgumentError(f"{what}: parameter {name} is no whole number of 0 or more, expected bytes as an int64")
    return number
