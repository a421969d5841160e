"""Fewer rows at once where memory has run out, and more again later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from serve.engine.backend import Backend
from serve.engine.errors import OutOfMemoryError
from serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 600.0
# What allocators say: Python's and numpy's, ONNX Runtime's arena, the C++ library, CUDA, cuBLAS and torch.
SIGNS = (
    "failed to allocate memory",
    "bad_alloc",
    "bad allocation",
    "out of memory",
    "unable to allocate",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "_allocation_failed",  # cuDNN 9's CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED and ..._HOST_...
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or any(sign in str(cause).lower() for sign in SIGNS):
            return True
        cause = cause.__cause__
    return False


class MemoryLimit:
    """How many rows one copy of a model computes at once. Used by one thread at a time.

    The limit halves when memory runs out and doubles after a while, until it is as large as what failed first. When it fails
    again soon after it has grown, the while becomes twice as long.
    """

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        """No limit.

        Args:
            label: whose it is, for the log.
            clock: in seconds.
        """
        self._label = label
        self._clock = clock
        self._rows: int | None = None
        self._enough = 0  # rows from which on there is no limit any more
        self._wait_s = FIRST_WAIT_S
        self._changed_at = 0.0
        self._grew = False  # at the last change

    @property
    def rows(self) -> int | None:
        """The most rows at once, as it is now; None is no limit."""
        return self._rows

    def run(self, backend: Backend, inputs: Tensors, rows: int) -> Tensors:
        """Compute a batch, in pieces where the limit or the memory asks for it.

        Args:
            backend: what computes.
            inputs: by name, of `rows` rows where there is more than one.
            rows: in the batch.

        Raises:
            OutOfMemoryError: not even one row can be computed.
            Exception: whatever else the runtime raises.
        """
        failed: list[int] = []
        while True:
            size = self._most(rows) if not failed else failed[-1] // 2
            try:
                outputs = backend.run(inputs) if size >= rows else _in_pieces(backend, inputs, rows, size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    # One row asks for more than there is. That is no reason to compute those of others one by one.
                    raise OutOfMemoryError from error
                failed.append(size)
            else:
                if failed:
                    self._shrink(failed, size)
                return outputs

    def _shrink(self, failed: Sequence[int], fits: int) -> None:
        now = self._clock()
        if self._grew:
            too_soon = now < self._changed_at + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S) if too_soon else FIRST_WAIT_S
        if self._rows is None:
            self._enough = failed[0]
        self._rows, self._changed_at, self._grew = fits, now, False
        logger.warning(
            "%s: out of memory with %d rows at once; it computes at most %d now, and tries more in %g s",
            self._label,
            failed[-1],
            fits,
            self._wait_s,
        )

    def _most(self, rows: int) -> int:
        return rows if self._rows is None else self._grown(self._rows, rows)

    def _grown(self, limit: int, rows: int) -> int:
        """How many of these rows to compute at once: as many as the limit says, doubled where it is time to try."""
        now = self._clock()
        if limit < rows and now >= self._changed_at + self._wait_s:
            limit *= 2
            self._changed_at, self._grew = now, True
            self._rows = limit if limit < self._enough else None
            if self._rows is None:
                logger.info("%s: it computes batches of any size again", self._label)
        return min(limit, rows)


def _in_pieces(backend: Backend, inputs: Tensors, rows: int, size: int) -> Tensors:
    pieces = [
        backend.run({name: array[start : start + size] for name, array in inputs.items()}) for start in range(0, rows, size)
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
