"""Tensors of a request as arrays, for the oracle: as the protocol has them, and nothing taken from the server's own code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
DTYPES: dict[str, np.dtype[Any]] = {"FP16": np.dtype("<f2"), "INT32": np.dtype("<i4"), "BOOL": np.dtype("?")}
# Of InferTensorContents; FP16 has none.
FIELDS = {"INT32": "int_contents", "BOOL": "bool_contents", "BYTES": "bytes_contents"}


class BadBytesError(Exception):
    """The elements are not those of such a tensor."""


def from_raw(raw: bytes, wire: str, shape: Sequence[int]) -> Array:
    """Little-endian, row-major, no padding; an element of BYTES is its length in four bytes, then itself.

    Raises:
        BadBytesError: the bytes are too few, or too many.
    """
    count = math.prod(shape)
    if wire == "BYTES":
        return _objects(_texts(raw), shape)
    if len(raw) != count * DTYPES[wire].itemsize:
        raise BadBytesError
    if wire == "BOOL":
        return np.frombuffer(raw, np.uint8).astype(np.bool_).reshape(shape)
    return np.frombuffer(raw, DTYPES[wire]).reshape(shape)


def from_contents(contents: Any, wire: str, shape: Sequence[int]) -> Array:
    """Elements one by one, in the field of their datatype and in no other.

    Raises:
        BadBytesError: there is no such field, others hold something, or the elements are too few or too many.
    """
    field = FIELDS.get(wire)
    filled = {descriptor.name for descriptor, _ in contents.ListFields()}
    values = list(getattr(contents, field)) if field else []
    if field is None or filled - {field} or len(values) != math.prod(shape):
        raise BadBytesError
    if wire == "BYTES":
        return _objects(values, shape)
    return np.array(values, DTYPES[wire]).reshape(shape)


def is_same(given: bytes, wire: str, expected: Array) -> bool:
    """Whether raw bytes hold these elements; any NaN is as good as another."""
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
    """BYTES for an ONNX model, whose strings are UTF-8 (onnx.proto, TensorProto.string_data)."""
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
