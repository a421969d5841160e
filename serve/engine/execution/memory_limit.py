"""Learns from memory shortages how many rows a copy of a model can compute at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.errors import InstanceLostError, OutOfMemoryError, is_out_of_memory
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

FIRST_WAIT_S: Final = 10.0
LONGEST_WAIT_S: Final = 600.0


class MemoryLimit:
    """The number of rows that one copy of a model computes at once. Used by one thread at a time.

    The limit halves when memory runs out and doubles after a wait, until it is as large as the batch that failed first. If
    memory runs out again soon after the limit has grown, the wait doubles.

    Attributes:
        rows: the current limit of rows; None is no limit.
        fitted: the most rows that were computed at once so far.
    """

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._clock = clock
        self.rows: int | None = None
        self.fitted = 0
        self._enough = 0  # number of rows at which the limit is dropped
        self._wait_s = FIRST_WAIT_S
        self._changed_at = 0.0
        self._grew = False  # whether the last change raised the limit

    def run(self, backend: Backend, inputs: Tensors, rows: int) -> Tensors:
        """Compute a batch of `rows` rows, in pieces if the limit or the memory requires it.

        Raises:
            OutOfMemoryError: not even one row can be computed.
            InstanceLostError: the copy no longer computes after it has run out of memory. The copy that replaces it computes at
                most as many rows at once as have been computed before.
            Exception: any other error of the runtime.
        """
        return self._run(backend, inputs, rows, [])

    def run_again(self, backend: Backend, inputs: Tensors, rows: int, error: Exception) -> Tensors:
        """Compute a batch in pieces, after its computation at once has ended with `error`.

        Raises:
            Exception: see `run`; `error` itself, unless memory ran out.
        """
        if isinstance(error, InstanceLostError) or not is_out_of_memory(error):
            raise error
        if rows == 1:
            raise OutOfMemoryError from error
        return self._run(backend, inputs, rows, [rows])

    def _run(self, backend: Backend, inputs: Tensors, rows: int, failed: list[int]) -> Tensors:
        """Compute a batch that did not fit into memory with the numbers of rows in `failed`."""
        while True:
            size = self._most(rows) if not failed else failed[-1] // 2
            try:
                outputs = backend.run(inputs) if size >= rows else _in_pieces(backend, inputs, rows, size)
            except InstanceLostError:
                if failed:
                    self.fitted = max(1, min(self.fitted, failed[-1] // 2))
                    self._shrink(failed, self.fitted)
                raise
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    # This request needs too much; the limit for others stays.
                    raise OutOfMemoryError from error
                failed.append(size)
            else:
                if failed:
                    self._shrink(failed, size)
                self.fitted = max(self.fitted, min(size, rows))
                return outputs

    def _shrink(self, failed: Sequence[int], fits: int) -> None:
        now = self._clock()
        if self._grew:
            too_soon = now < self._changed_at + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S) if too_soon else FIRST_WAIT_S
        if self.rows is None:
            self._enough = failed[0]
        self.rows, self._changed_at, self._grew = fits, now, False
        logger.warning(
            "%s: out of memory with %d rows at once; it computes at most %d now, and tries more in %g s",
            self._label,
            failed[-1],
            fits,
            self._wait_s,
            extra={"model": self._label},
        )

    def _most(self, rows: int) -> int:
        return rows if self.rows is None else self._grown(self.rows, rows)

    def _grown(self, limit: int, rows: int) -> int:
        """Return the limit for a batch of `rows` rows, doubled if the wait is over."""
        now = self._clock()
        if limit < rows and now >= self._changed_at + self._wait_s:
            limit *= 2
            self._changed_at, self._grew = now, True
            self.rows = limit if limit < self._enough else None
            if self.rows is None:
                logger.info("%s: it computes batches of any size again", self._label, extra={"model": self._label})
        return min(limit, rows)


def _in_pieces(backend: Backend, inputs: Tensors, rows: int, size: int) -> Tensors:
    pieces = [
        backend.run({name: array[start : start + size] for name, array in inputs.items()}) for start in range(0, rows, size)
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
