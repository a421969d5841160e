"""Batch invariance: whether each row of a batch gets the answer that it gets alone, so that requests may share batches.

A model file does not state it. All tensors of a detector may begin with a dimension of any size, although the rows of its input
are images, and the rows of its output the objects in all of them: split by rows, one client would get another's result. Or each
output row depends on the other input rows, as after a mean over the first dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from halfserve.serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)


# Tolerance, as a part of an output's largest value, or of its integers that differ. It is far more than the difference between
# kernels for other batch sizes, or from int8 scales that are taken over all rows.
ALIKE: Final = 0.1
T = TypeVar("T")
ONE_BY_ONE: Final = "its requests are computed one by one from now on. To say so from the start, set max_batch_size: 0"


def dependent_output(run: Callable[[T], Tensors], first: T, second: T, together: T) -> str | None:
    """Return the first output whose rows depend on the other rows of a batch; None if there is none.

    `run` computes the outputs, in arrays of their own, of the first rows, of the second rows, and of both `together`.
    """
    alone, beside, both = run(first), run(second), run(together)
    suspects = [name for name in both if differ(np.concatenate([alone[name], beside[name]]), both[name])]
    if not suspects:
        return None
    again = run(first)
    return next((name for name in suspects if not differ(alone[name], again[name])), None)  # otherwise the model is random


def differ(ones: Array, others: Array) -> bool:
    """Return whether two outputs differ by more than rounding; False if they cannot be compared."""
    if ones.shape != others.shape or not ones.size or ones.dtype.hasobject:
        return False
    if ones.dtype.kind in "iub" and float(np.mean(ones != others)) <= ALIKE:
        return False  # may be due to rounding, as in the pixels of an image
    a, b = (array.astype(np.float64) for array in (ones, others))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    return bool(a.size) and float(np.abs(a - b).max()) > ALIKE * max(float(np.abs(a).max()), float(np.abs(b).max()))


class BatchInvariance:
    """Evidence from one model's answers on whether requests may share batches.

    Attributes:
        is_safe: whether no answer shows yet that requests must not share batches. Set to False on worker threads, and never
            back.
        is_doubtful: whether the check before serving could not tell if rows depend on each other; see `may_share`.
        same_may_share: whether requests with equal rows have been compared and may share.
    """

    __slots__ = ("_label", "_mixed", "is_doubtful", "is_safe", "same_may_share")

    def __init__(self, label: str) -> None:
        self._label = label
        self._mixed = False  # True after one such comparison, which may be due to a class that rounding has changed
        self.is_safe = True
        self.is_doubtful = self.same_may_share = False

    def look(self, outputs: Tensors, rows: int) -> None:
        """Check the outputs of a request that was computed alone, with `rows` rows."""
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != rows:
                self.is_safe = False
                logger.warning(
                    "%s: output %r has shape %s for %d rows; %s",
                    self._label,
                    name,
                    list(array.shape),
                    rows,
                    ONE_BY_ONE,
                    extra={"model": self._label},
                )
                return

    def looked(self, mixed: str | None, *, differed: bool) -> None:
        """Record the result of a comparison of two requests: the dependent output or None, and whether their rows differed."""
        if mixed is None:
            self.is_doubtful, self.same_may_share = not differed, True
        elif self._mixed:
            self.is_safe = self.is_doubtful = False
            logger.warning(
                "%s: output %r of a row depends on the other rows of its batch; %s",
                self._label,
                mixed,
                ONE_BY_ONE,
                extra={"model": self._label},
            )
        self._mixed = mixed is not None
