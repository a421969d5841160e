"""Which copies of a model can take a batch, and which of those that compute one can take the next."""

from __future__ import annotations

import math
from collections.abc import Sequence

from serve.engine.instances.instance import Instance
from serve.engine.instances.short_batches import SHORT_S

# An instance whose batches take no longer than this takes the next one while it computes: the way from its thread to the loop
# and back takes half a millisecond, in which it would compute nothing. Not so with short batches, which the loop itself will
# compute, nor with long ones: what is less urgent than what has come meanwhile would be computed first.
AHEAD_S = 0.05
MOST_BATCHES = 2


class FreeInstances:
    """Keeps count of one model's instances.

    Attributes:
        idle: that compute nothing.
        latest_s: seconds that the latest batch on a thread was computed.
    """

    __slots__ = ("_busy", "_may_go_ahead", "idle", "latest_s")

    def __init__(self, instances: Sequence[Instance], *, is_steady: bool = True) -> None:
        """All are idle, and nothing is known of their batches.

        Args:
            instances: all copies of the model.
            is_steady: its batches take about as long as each other. A batch behind one that takes much longer would wait for
                it while other copies compute what came later.
        """
        self.idle = list(instances)
        self._may_go_ahead = is_steady or len(instances) == 1
        self.latest_s = math.inf
        self._busy: list[Instance] = []  # that compute one batch, and have no other

    @property
    def can_go_ahead(self) -> bool:
        """Whether an instance that computes a batch should take the next one, all being busy."""
        return self._may_go_ahead and bool(self._busy) and not self.idle and SHORT_S < self.latest_s <= AHEAD_S

    def take_busy(self) -> Instance:
        """One that computes a batch; whoever takes it gives it another."""
        return self._busy.pop()

    def sort_in(self, instance: Instance) -> None:
        """Look at one anew that was taken, has finished a batch, or was loaded anew."""
        for free in (self._busy, self.idle):
            if instance in free:
                free.remove(instance)
        if instance.is_up and instance.batches < MOST_BATCHES:
            (self._busy if instance.batches else self.idle).append(instance)
