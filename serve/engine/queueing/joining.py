"""Whether a model's requests may share batches: only where each row that goes in comes out as a row, in its place.

A model file does not say so. All of a detector's tensors may begin with a dimension of any size, where its input's rows are
images and its output's what it found in all of them: cut by rows, one client would get what was found in another's image. Or
the rows come out, and each depends on the others.
"""

from __future__ import annotations

import logging

from serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

ONE_BY_ONE = "its requests are computed one by one from now on. To say so from the start, set max_batch_size: 0"


class Joining:
    """What one model's answers have shown.

    Attributes:
        is_safe: nothing speaks against joining yet. Written on worker threads, and never taken back.
        is_doubtful: whether rows depend on each other could not be found out before the model served; see `may_share`.
        same_may_share: rows that are all the same have been looked at.
    """

    __slots__ = ("_label", "_mixed", "is_doubtful", "is_safe", "same_may_share")

    def __init__(self, label: str) -> None:
        """Nothing has been seen.

        Args:
            label: of the model, for the log.
        """
        self._label = label
        self._mixed = False  # once may be a class that a rounding has changed
        self.is_safe = True
        self.is_doubtful = self.same_may_share = False

    def look(self, outputs: Tensors, rows: int) -> None:
        """Look at what a request got that was computed alone, with `rows` rows."""
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != rows:
                self.is_safe = False
                logger.warning(
                    "%s: output %r has shape %s for %d rows; %s", self._label, name, list(array.shape), rows, ONE_BY_ONE
                )
                return

    def looked(self, mixed: str | None, *, differed: bool) -> None:
        """Note what two requests have shown that were computed alone and together.

        Args:
            mixed: the output whose rows depend on each other; None for none.
            differed: their rows were not all the same.
        """
        if mixed is None:
            self.is_doubtful, self.same_may_share = not differed, True
        elif self._mixed:
            self.is_safe = self.is_doubtful = False
            logger.warning("%s: output %r of a row depends on the other rows of its batch; %s", self._label, mixed, ONE_BY_ONE)
        self._mixed = mixed is not None
