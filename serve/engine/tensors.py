"""Specifications of a model's inputs and outputs, and whether a given shape fits."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from halfserve.protos.datatypes import Datatype

Array: TypeAlias = np.ndarray[Any, Any]
Tensors: TypeAlias = Mapping[str, Array]

ANY_SIZE = -1
MAX_SHOWN = 16  # most sizes that an error text quotes; a client's shape may have millions


def memory_of(array: Array) -> int:
    """Return the bytes of an array and of the texts that it refers to."""
    if not array.dtype.hasobject:
        return array.nbytes
    return sum([sys.getsizeof(element) for element in array.ravel()], array.nbytes)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of a model.

    Attributes:
        name: name in the ONNX graph.
        datatype: datatype on the wire; the backend may compute in a wider one.
        shape: sizes, with the batch dimension first if the model has one; -1 for any size.
        model_shape: the model's own shape, if the configuration gives clients another one (`reshape`).
        optional: whether a request may leave the input out.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    model_shape: tuple[int, ...] | None = None
    optional: bool = False

    def shape_for_model(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the model's own shape for a client's shape that fits."""
        if self.model_shape is None:
            return shape
        return _filled(self.model_shape, self.shape, shape)

    def to_model(self, array: Array) -> Array:
        """Return a client's array in the model's own shape."""
        return array if self.model_shape is None else array.reshape(self.shape_for_model(array.shape))

    def to_client(self, array: Array) -> Array:
        """Return the model's array in the clients' shape."""
        if self.model_shape is None:
            return array
        return array.reshape(_filled(self.shape, self.model_shape, array.shape))

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Return why `shape` does not fit, as the end of a sentence; None if it fits."""
        if len(shape) != len(self.shape):
            return f"has shape {_shown(shape)}, expected {len(self.shape)} dimensions: {list(self.shape)}"
        for given, expected in zip(shape, self.shape, strict=True):
            if given < 0 or expected not in {ANY_SIZE, given}:
                return f"has shape {list(shape)}, expected {list(self.shape)} (-1 takes any size)"
        return None


def can_reshape(dims: Sequence[int], own: Sequence[int]) -> bool:
    """Whether tensors of `dims` can have the shape `own`: each open size is the other's, with equally many elements between."""
    sizes = [*dims, *own]
    return min(sizes, default=1) >= ANY_SIZE and 0 not in sizes and _runs(dims) == _runs(own)


def _runs(sizes: Sequence[int]) -> list[int]:
    """Elements before, between and after the open sizes."""
    runs = [1]
    for size in sizes:
        if size == ANY_SIZE:
            runs.append(1)
        else:
            runs[-1] *= size
    return runs


def _filled(shape: tuple[int, ...], pattern: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with the sizes that `given` has where `pattern` leaves them open, in their order."""
    sizes = iter([size for size, wanted in zip(given, pattern, strict=False) if wanted == ANY_SIZE])
    return tuple([next(sizes, size) if size == ANY_SIZE else size for size in shape])


def _shown(shape: Sequence[int]) -> str:
    if len(shape) <= MAX_SHOWN:
        return str(list(shape))
    return f"[{', '.join(map(str, shape[:MAX_SHOWN]))}, ...]"
