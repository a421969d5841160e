"""Batches that are filled up to sizes a model is good at: with CUDA graphs, or where each new size costs a compilation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serve.engine.tensors import Array


def padded_rows(rows: int, sizes: Sequence[int]) -> int:
    """The rows with which a batch runs.

    Args:
        rows: that it has.
        sizes: that it may be filled up to, in rising order; none leaves every batch as it is.

    Returns:
        The smallest of the sizes that holds the batch; `rows` where none does.
    """
    if not sizes:
        return rows
    return next((size for size in sizes if size >= rows), rows)


def pad_rows(array: Array, rows: int) -> Array:
    """Fill one input up to `rows` rows.

    What is added repeats the last row: unlike zeros, it is sure to be something that the model takes (an index into a table, a
    mask that leaves something over), and it cannot make a value that is not finite where there was none.

    Args:
        array: [n, ...] with 1 <= n <= rows.
        rows: wanted.

    Returns:
        [rows, ...]; the array itself where nothing is missing.
    """
    missing = rows - array.shape[0]
    if missing <= 0:
        return array
    return np.concatenate([array, np.broadcast_to(array[-1:], (missing, *array.shape[1:]))])
