"""The `classification` extension: the best classes of an output as text, "value:index" or "value:index:label"."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from serve.engine.errors import InvalidArgumentError
from serve.engine.tensors import Array

# In one answer. They are written on the event loop, for two thirds of a microsecond each, and take a hundred bytes: an output
# may have millions of numbers, and a request that asks to name them all is a hundred bytes long.
MAX_NAMED = 2**16
MANY = 4096  # classes of which finding a few takes less than sorting all


def classify(scores: Array, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """The best `count` classes, best first; equal scores in the order of their index, NaN last.

    Args:
        scores: numbers; all dimensions but the batch are one list of classes.
        count: at least 1; more than there are classes gives them all.
        labels: of the classes, by index; those beyond the last have none.
        batched: the first dimension counts rows, each with classes of its own.

    Returns:
        `bytes` objects in an array [rows, classes], or [classes] where there is no batch.

    Raises:
        InvalidArgumentError: these are more than MAX_NAMED.
    """
    count_of_rows = scores.shape[0] if batched else 1
    rows = scores.reshape(count_of_rows, math.prod(scores.shape[batched:]))
    named = count_of_rows * min(count, rows.shape[1])
    if named > MAX_NAMED:
        raise InvalidArgumentError(
            f"{named} classes are asked for, expected at most {MAX_NAMED}; ask for fewer, or the numbers"
        )
    # Floating numbers of fewer bits are float64 without loss, whole numbers of 64 bits are not. A NaN is sorted to the end.
    with np.errstate(invalid="ignore"):  # a NaN of the signalling kind is still only a NaN
        # numpy does not count bfloat16 among the floating kinds.
        values = rows if rows.dtype.kind in "iub" else rows.astype(np.float64)
        falling = ~rows if rows.dtype.kind in "iu" else -values.astype(np.float64, copy=False)
    places = _smallest(falling, count)
    found = np.take_along_axis(values, places, axis=1).ravel().tolist()
    best = np.empty(places.size, object)
    best[:] = [_text(value, index, labels) for value, index in zip(found, places.ravel().tolist(), strict=True)]
    return best.reshape(places.shape) if batched else best


def _smallest(rows: Array, count: int) -> Array:
    """Where the smallest numbers of each row are, in order."""
    if rows.shape[1] < max(MANY, 8 * count):
        return np.argsort(rows, axis=1, kind="stable")[:, :count]
    return np.array([_smallest_of_many(row, count) for row in rows], np.intp).reshape(len(rows), count)


def _smallest_of_many(row: Array, count: int) -> Array:
    last = np.partition(row, count - 1)[count - 1]
    # All that are as small as the last of them, too: those of a lower index come first.
    places = np.arange(len(row)) if last != last else np.flatnonzero(row <= last)  # noqa: PLR0124  (which only a NaN is not)
    return places[np.argsort(row[places], kind="stable")][:count]


def _text(score: float, index: int, labels: Sequence[str]) -> bytes:
    value = str(score) if isinstance(score, int) else f"{score:.6f}"
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{value}:{index}{label}".encode()
