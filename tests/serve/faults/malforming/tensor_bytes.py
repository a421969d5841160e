"""A request's tensors as arrays for the oracle: written from the protocol, without any of the server's own code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
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
