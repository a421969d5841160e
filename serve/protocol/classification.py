"""Triton's classification extension: the best classes of an output, by name, in place of its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.tensors import Array

# Most classes in one response. Each takes 0.7 us and a hundred bytes, and a request of a hundred bytes can ask for millions.
MAX_NAMED: Final = 2**16
MAX_CLASSES: Final = 1_000_000  # most classes of one row, as in Triton: sorting them holds up other requests
MANY_CLASSES: Final = 4096  # number of classes from which partitioning is faster than sorting all


def classify(scores: Array, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Name the best `count` classes as "value:index" or "value:index:label".

    Equal scores keep the order of their index; NaN comes last.

    Args:
        scores: numbers; all dimensions but the batch form one list of classes.
        count: number of classes to name, at least 1; a larger number than there are classes names all.
        labels: names of the classes by index; classes beyond the list have none.
        batched: whether the first dimension is the batch.

    Returns:
        An array of `bytes` objects of shape [rows, classes], or [classes] without a batch.

    Raises:
        InvalidArgumentError: more than MAX_NAMED classes are requested, or a row has more than MAX_CLASSES.
    """
    count_of_rows = scores.shape[0] if batched else 1
    rows = scores.reshape(count_of_rows, math.prod(scores.shape[batched:]))
    if rows.shape[1] > MAX_CLASSES:
        raise InvalidArgumentError(
            f"classification output tensor too large: it has {rows.shape[1]} classes, expected at most {MAX_CLASSES}; ask for "
            "the numbers"
        )
    named = count_of_rows * min(count, rows.shape[1])
    if named > MAX_NAMED:
        raise InvalidArgumentError(
            f"{named} classes are asked for, expected at most {MAX_NAMED}; ask for fewer, or the numbers"
        )
    # float64 holds smaller floats exactly, but not 64-bit integers. NaN is sorted to the end.
    with np.errstate(invalid="ignore"):  # signalling NaNs raise this warning
        # ml_dtypes' bfloat16 does not have numpy's kind "f".
        values = rows if rows.dtype.kind in "iub" else rows.astype(np.float64)
        falling = ~rows if rows.dtype.kind in "iu" else -values.astype(np.float64, copy=False)
    places = _smallest(falling, count)
    found = np.take_along_axis(values, places, axis=1).ravel().tolist()
    write = "{:.6f}".format if values.dtype.kind == "f" else str
    best = np.empty(places.size, object)
    best[:] = [_text(write(value), index, labels) for value, index in zip(found, places.ravel().tolist(), strict=True)]
    return best.reshape(places.shape) if batched else best


def _smallest(rows: Array, count: int) -> Array:
    if rows.shape[1] < max(MANY_CLASSES, 8 * count):
        return np.argsort(rows, axis=1, kind="stable")[:, :count]
    return np.array([_smallest_of_many(row, count) for row in rows], np.intp).reshape(len(rows), count)


def _smallest_of_many(row: Array, count: int) -> Array:
    last = np.partition(row, count - 1)[count - 1]
    # Among equal numbers at the boundary, lower indices come first.
    places = np.arange(len(row)) if last != last else np.flatnonzero(row <= last)  # noqa: PLR0124  (true for NaN alone)
    return places[np.argsort(row[places], kind="stable")][:count]


def _text(score: str, index: int, labels: Sequence[str]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{score}:{index}{label}".encode()
