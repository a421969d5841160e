"""Whether a model's requests may share batches: only where each row that goes in comes out as a row, in its place.

A model file does not say so. All of a detector's tensors may begin with a dimension of any size, where its input's rows are
images and its output's what it found in all of them: cut by rows, one client would get what was found in another's image.
"""

from __future__ import annotations

import logging

from serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)


class Joining:
    """What one model's answers to single requests have shown.

    Attributes:
        is_safe: nothing speaks against joining yet. Written on worker threads, and never taken back.
    """

    __slots__ = ("_label", "is_safe")

    def __init__(self, label: str) -> None:
        """Nothing has been seen.

        Args:
            label: of the model, for the log.
        """
        self._label = label
        self.is_safe = True

    def look(self, outputs: Tensors, rows: int) -> None:
        """Look at what a request got that was computed alone, with `rows` rows."""
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != rows:
                self.is_safe = False
                logger.warning(
                    "%s: output %r has shape %s for %d rows; its requests are computed one by one from now on. To say so "
                    "from the start, set max_batch_size: 0",
                    self._label,
                    name,
                    list(array.shape),
                    rows,
                )
                return
