"""One inference request on its way through the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from serve.engine.errors import InferenceError
from serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

Done = Callable[[Tensors | InferenceError], None]


@dataclass(slots=True, eq=False)
class InferRequest:
    """A checked request. It carries its callback, so that no table of waiting futures is needed.

    Attributes:
        inputs: arrays that fit the model's specifications, all with the same number of rows.
        outputs: names of the outputs the client wants, in its order.
        rows: size of the batch dimension; 1 for a model without one.
        bucket: requests with equal buckets can share a batch.
        deadline: when its answer must be there, on time.monotonic()'s clock, in seconds; None whenever it is done.
        priority: its level, 0 the most urgent.
        patience: on the same clock: when it is to stand behind all others; None never.
        leave_by: on the same clock: when it must have left the queue for an instance; None waits for ever.
        done: called once on the event loop with the outputs or the error, unless the request was cancelled.
        arrived_ns: time.monotonic_ns() of the arrival.
        size: bytes it holds until it is computed, or is going to read from shared memory then.
        cancelled: the client has gone; nobody waits for the answer.
        replayed: its copy of the model broke, and it was queued once more.
        line: the queue's own mark, where the request waits.
        response_parameters: what the answer says of itself beside its outputs; None for nothing.
    """

    inputs: Tensors
    outputs: tuple[str, ...]
    rows: int
    bucket: Hashable
    deadline: float | None
    done: Done
    priority: int = 0
    patience: float | None = None
    leave_by: float | None = None
    size: int = 0
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    cancelled: bool = False
    replayed: bool = False
    line: object = None
    response_parameters: dict[str, str] | None = None

    def finish(self, result: Tensors | InferenceError) -> None:
        """Hand the result to whoever still waits for it. What goes wrong there stays there: batch-mates are answered too."""
        if self.cancelled:
            return
        try:
            self.done(result)
        except Exception:
            logger.exception("an answer could not be handed over")
