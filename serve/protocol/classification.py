"""The `classification` extension: the best classes of an output as text, "value:index" or "value:index:label"."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from serve.engine.tensors import Array


def classify(scores: Array, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """The best `count` classes, best first; equal scores in the order of their index, NaN last.

    Args:
        scores: numbers; all dimensions but the batch are one list of classes.
        count: at least 1; more than there are classes gives them all.
        labels: of the classes, by index; those beyond the last have none.
        batched: the first dimension counts rows, each with classes of its own.

    Returns:
        `bytes` objects in an array [rows, classes], or [classes] where there is no batch.
    """
    count_of_rows = scores.shape[0] if batched else 1
    rows = scores.reshape(count_of_rows, math.prod(scores.shape[batched:]))
    # Floating numbers of fewer bits are float64 without loss, whole numbers of 64 bits are not. A NaN is sorted to the end.
    with np.errstate(invalid="ignore"):  # a NaN of the signalling kind is still only a NaN
        falling = ~rows if rows.dtype.kind in "iu" else -rows.astype(np.float64)
    descending = np.argsort(falling, axis=1, kind="stable")[:, :count]
    best = np.empty(descending.shape, object)
    for place, index in np.ndenumerate(descending):
        best[place] = _text(rows[place[0], index], int(index), labels)
    return best if batched else best[0]


def _text(score: np.generic, index: int, labels: Sequence[str]) -> bytes:
    # numpy does not count bfloat16 among the floating kinds.
    value = str(score) if score.dtype.kind in "iub" else f"{float(score):.6f}"
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{value}:{index}{label}".encode()
