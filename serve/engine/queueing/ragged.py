"""Ragged batches, as Triton defines them: inputs of different shapes joined end to end, for models that are made for that.

The model learns where each request begins from further inputs, which are made here (`batch_input`). Outputs may be split by
the shapes of an input (`batch_output`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfserve.serve.engine.errors import BackendError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchInput:
    """An input that is made from the shapes of a batch's requests.

    Attributes:
        names: the model's inputs that get it.
        source: the input whose shapes it is made from.
        make: makes its value from the shapes of the source, one per request, each beginning with the rows.
        dtype: dtype of its elements.
    """

    names: tuple[str, ...]
    source: str
    make: Callable[[Sequence[Shape]], Array]
    dtype: np.dtype[Any]


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Joins the requests of a model into ragged batches, and splits the outputs.

    Attributes:
        inputs: inputs that are joined end to end, as one dimension.
        made: the further inputs.
        scattered: outputs that are split by the shapes of an input: their own dims, without the rows, and that input.
    """

    inputs: frozenset[str]
    made: tuple[BatchInput, ...] = ()
    scattered: Mapping[str, tuple[Shape, str]]

    def bucket(self, shapes: Mapping[str, Shape]) -> Hashable:
        """Return a bucket, equal for requests that may share a batch, from their inputs' shapes without the rows, in the
        model's order.
        """
        return tuple([None if name in self.inputs else shape for name, shape in shapes.items()])

    def joined(self, requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any]) -> Array:
        """Return all elements of one ragged input of the requests, in order, in one dimension.

        Raises:
            InferenceError: bytes in shared memory cannot be read.
        """
        parts = [request.inputs[name].ravel() for request in requests]
        return np.concatenate(parts, dtype=dtype, casting="unsafe")

    def made_inputs(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Make the inputs that describe the batch."""
        values: dict[str, Array] = {}
        for made in self.made:
            value = made.make([request.inputs[made.source].shape for request in requests]).astype(made.dtype)
            values.update(dict.fromkeys(made.names, value))
        return values

    def answers(self, outputs: Tensors, requests: Sequence[InferRequest]) -> list[Tensors]:
        """Return each request's part of every output, as views.

        Raises:
            BackendError: an output has another size than these requests' parts together.
        """
        found: list[dict[str, Array]] = [{} for _ in requests]
        rows = sum(request.rows for request in requests)
        for name, array in outputs.items():
            shapes = [self._shape(name, array, request) for request in requests]
            scattered = name in self.scattered
            flat = array.reshape(-1) if scattered else array
            expected = sum(map(math.prod, shapes)) if scattered else rows
            if flat.ndim == 0 or len(flat) != expected:
                what = "elements, as many as its requests" if scattered else "rows, one per row of the batch"
                raise BackendError(f"output {name!r} has shape {list(array.shape)}, expected {expected} {what}")
            start = 0
            for answer, shape in zip(found, shapes, strict=True):
                end = start + (math.prod(shape) if scattered else shape[0])
                answer[name] = flat[start:end].reshape(shape)
                start = end
        return [{name: answer[name] for name in request.outputs} for answer, request in zip(found, requests, strict=True)]

    def _shape(self, name: str, array: Array, request: InferRequest) -> Shape:
        if name not in self.scattered:
            return (request.rows, *array.shape[1:])
        dims, source = self.scattered[name]
        given = request.inputs[source].shape[1:]
        return (request.rows, *(given[place] if size == ANY_SIZE else size for place, size in enumerate(dims)))


def element_counts(shapes: Sequence[Shape]) -> Array:
    """Return the number of elements of each request, as int64 [requests]."""
    return np.array([math.prod(shape) for shape in shapes], np.int64)


def element_ends(shapes: Sequence[Shape]) -> Array:
    """Return the end of each request among all elements, as int64 [requests]."""
    return np.cumsum(element_counts(shapes), dtype=np.int64)


def element_bounds(shapes: Sequence[Shape]) -> Array:
    """Return 0 and the end of each request, as int64 [requests + 1]."""
    return np.concatenate([np.zeros(1, np.int64), element_ends(shapes)])


def most_elements(shapes: Sequence[Shape]) -> Array:
    """Return zeros, as many as the largest request has elements, as int64."""
    return np.zeros(int(element_counts(shapes).max()), np.int64)


def item_shapes(shapes: Sequence[Shape]) -> Array:
    """Return the shape of each row without the batch dimension, as int64 [rows, dimensions]."""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


def flat_item_shapes(shapes: Sequence[Shape]) -> Array:
    """Return `item_shapes` as one dimension."""
    return item_shapes(shapes).ravel()
