"""`BatchRecorder`: one record of all models that a framework's trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from halfserve.amp_core.recorder.record import Record
from halfserve.amp_core.recorder.recorder import Recorder


class BatchRecorder:
    """Records one batch in `every`. The model may differ from batch to batch, as a trainer may create new ones.

    Attributes:
        record: Everything recorded so far; may be set, to continue an earlier one.

    Args:
        every: The interval in batches; 0 records none.

    Raises:
        ValueError: If `every` is negative.
    """

    def __init__(self, every: int) -> None:
        if every < 0:
            raise ValueError(f"record_every is {every}; expected a number of batches from 1, or 0 for no record")
        self.record = Record()
        self._every, self._batches = every, 0

    @contextmanager
    def batch(self, model: nn.Module, scale: float) -> Iterator[None]:
        """The context of a batch's forward, loss and backward; records the batch if it is due.

        Args:
            model: The model without a wrapper for several processes.
            scale: The loss scale.
        """
        self._batches += 1
        if not self._every or (self._batches - 1) % self._every:
            yield
            return
        recorder = Recorder(model, every=1)
        with recorder.step(1, scale=scale):
            yield
        self.record = self.record.merged(recorder.record())
