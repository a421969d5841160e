"""Whether rows get together what they get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from serve.engine.tensors import Array, Tensors

# Of an output's largest value, and of all whole numbers: far more than kernels for another size make of it, or int8 scales that
# are taken over all rows.
ALIKE = 0.1

T = TypeVar("T")


def mixed_output(run: Callable[[T], Tensors], first: T, second: T, together: T) -> str | None:
    """The first output whose rows depend on the other rows of a batch; None where none shows it.

    Args:
        run: what the model answers; what it raises, this raises. Its arrays must stay as they are.
        first: rows.
        second: others.
        together: the first ones and then the second ones.
    """
    alone, beside, both = run(first), run(second), run(together)
    suspects = [name for name in both if differ(np.concatenate([alone[name], beside[name]]), both[name])]
    if not suspects:
        return None
    again = run(first)
    return next((name for name in suspects if not differ(alone[name], again[name])), None)  # else it is a matter of chance


def differ(ones: Array, others: Array) -> bool:
    """Whether two outputs are not alike; they are where there is nothing to compare."""
    if ones.shape != others.shape or not ones.size or ones.dtype.hasobject:
        return False
    if ones.dtype.kind in "iub" and float(np.mean(ones != others)) <= ALIKE:
        return False  # otherwise these may be roundings, as in the pixels of a picture
    a, b = (array.astype(np.float64) for array in (ones, others))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    return bool(a.size) and float(np.abs(a - b).max()) > ALIKE * max(float(np.abs(a).max()), float(np.abs(b).max()))
