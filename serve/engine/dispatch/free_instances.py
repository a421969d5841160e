"""The copies of a model that can take a batch now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from halfserve.serve.engine.dispatch.short_batches import SHORT_S
from halfserve.serve.engine.execution.instance import Instance

# An instance whose batches take at most this long gets its next batch while it computes: otherwise it would idle for the half
# millisecond from its thread to the loop and back. Short batches are excluded, because the loop computes them, and long ones,
# because a request would be computed before a more urgent one that arrives meanwhile.
AHEAD_S: Final = 0.05


class FreeInstances:
    """The copies of a model that can take a batch now, idle or busy.

    Attributes:
        idle: copies that compute nothing.
        latest_s: seconds that the latest batch on a thread took.
    """

    __slots__ = ("_busy", "_instances", "_may_go_ahead", "idle", "latest_s")

    def __init__(self, instances: Sequence[Instance], *, is_steady: bool = True) -> None:
        """Begin with all copies idle.

        `is_steady`: whether the model's batches take about equally long. Otherwise a batch behind a much longer one would wait
        for it while other copies compute later requests.
        """
        self.idle = list(instances)
        self._instances = instances
        self._may_go_ahead = is_steady or len(instances) == 1
        self.latest_s = math.inf
        self._busy: list[Instance] = []  # instances with exactly one batch

    @property
    def shares_batches(self) -> bool:
        """Whether requests of the model may share a batch, as far as its copies know."""
        return self._instances[0].shares_batches

    @property
    def can_go_ahead(self) -> bool:
        """Whether a busy instance should take the next batch, because all are busy."""
        return self._may_go_ahead and bool(self._busy) and not self.idle and SHORT_S < self.latest_s <= AHEAD_S

    def take_busy(self) -> Instance:
        """Remove and return an instance that computes one batch, so that it gets another."""
        return self._busy.pop()

    def sort_in(self, instance: Instance) -> None:
        """Update an instance that was taken, has finished a batch, or was loaded again."""
        for free in (self._busy, self.idle):
            if instance in free:
                free.remove(instance)
        if instance.takes_next:
            (self._busy if instance.batches else self.idle).append(instance)
