"""Tensors as wire bytes: little-endian, row-major, without padding. Used by server and client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from struct import Struct
from struct import error as StructError  # noqa: N812  (it is a class)
from typing import TYPE_CHECKING, Any

import numpy as np

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import ByteCountError

if TYPE_CHECKING:
    from halfserve.protos.datatypes import Datatype

LENGTH_PREFIX = Struct("<I")  # precedes each BYTES element: the element's length as uint32
LENGTH_PREFIX_BYTES = LENGTH_PREFIX.size


def from_raw(raw: bytes | memoryview, datatype: Datatype, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """View wire bytes as an array, without a copy (BOOL and BYTES excepted).

    Args:
        raw: the tensor's bytes; the array keeps them alive.
        datatype: datatype of the elements.
        shape: sizes of all dimensions, none of them -1.

    Returns:
        A read-only array of `datatype.numpy` and `shape`. BF16 comes as uint16 bit patterns, BYTES as `bytes` objects.

    Raises:
        ValueError: the byte count does not fit the shape; the text gives both counts.
    """
    if datatype.itemsize is None:
        return _from_length_prefixed(raw, shape)
    expected = math.prod(shape) * datatype.itemsize
    if len(raw) != expected:
        text = f"has {len(raw)} bytes, expected {expected} for {datatype.wire} of shape {list(shape)}"
        raise ByteCountError(text, TritonPhrase.BYTE_SIZE, given=len(raw), expected=expected)
    if datatype.wire == "BOOL":
        # Any non-zero byte is true; viewing 2 as a numpy bool would be neither.
        return np.frombuffer(raw, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(raw, datatype.numpy or np.dtype("<u2")).reshape(shape)


def to_raw(array: np.ndarray[Any, Any], datatype: Datatype) -> bytes:
    """Return the array's elements as wire bytes. BYTES come from an array of `bytes` or `str` (UTF-8), BF16 from one of
    `ml_dtypes.bfloat16` or of uint16 bit patterns.
    """
    if datatype.itemsize is None:
        return _to_length_prefixed(array)
    if datatype.numpy is None:
        return np.ascontiguousarray(array).view("<u2").tobytes()
    return np.ascontiguousarray(array, datatype.numpy).tobytes()


def raw_view(array: np.ndarray[Any, Any], datatype: Datatype) -> bytes | memoryview:
    """Return the bytes of `to_raw`, without a copy if the array's memory is already in wire format."""
    if datatype.itemsize is None:
        return _to_length_prefixed(array)
    return np.ascontiguousarray(array, datatype.numpy).reshape(-1).view(np.uint8).data


def _from_length_prefixed(raw: bytes | memoryview, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    data, expected = bytes(raw), math.prod(shape)
    elements: list[bytes] = []
    take, length_at = elements.append, LENGTH_PREFIX.unpack_from
    position, end = 0, len(data)
    try:
        while position < end and len(elements) < expected:
            start = position + LENGTH_PREFIX_BYTES
            position = start + length_at(data, position)[0]
            take(data[start:position])
    except StructError:
        take(data[position:])
        position = end + 1
    if position > end:
        raise ValueError(
            f"ends inside BYTES element {len(elements) - 1}, expected a {LENGTH_PREFIX_BYTES}-byte length and as many bytes"
        )
    if position < end or len(elements) < expected:
        given, phrase = len(elements), TritonPhrase.FEW_ELEMENTS
        count = str(given)
        if position < end:
            count, given, phrase = f"more than {expected}", expected + 1, TritonPhrase.MANY_ELEMENTS
        text = f"has {count} BYTES elements, expected {expected} for shape {list(shape)}"
        raise ByteCountError(text, phrase, given=given, expected=expected)
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _to_length_prefixed(array: np.ndarray[Any, Any]) -> bytes:
    encoded = [e if isinstance(e, bytes) else str(e).encode() for e in array.ravel()]
    return b"".join(len(e).to_bytes(LENGTH_PREFIX_BYTES, "little") + e for e in encoded)
