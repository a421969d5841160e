"""When a model's drift is bad enough to say so, and when it is well again. Pure."""

from __future__ import annotations

from collections import deque

# Runs that are looked at together, and how many there must be before they say anything.
WINDOW = 200
LEAST_RUNS = 20
# A sample at the edge of what the model was made for may be over the threshold now and then; one in twenty is no accident. To
# be well again it takes far fewer, so that a share near the limit does not flip the state with every run.
DEGRADED_SHARE = 0.05
RECOVERED_SHARE = 0.01


class Degradation:
    """Takes the scaled errors of shadow runs, one by one.

    Attributes:
        threshold: the scaled error that is allowed.
        degraded: more than one in twenty of the last 200 runs was over it, and no fewer than 1 in 100 is since.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.degraded = False
        self._over: deque[bool] = deque(maxlen=WINDOW)

    @property
    def share(self) -> float:
        """Of the runs in the window, the share that is over the threshold; 0 where there are none."""
        return sum(self._over) / len(self._over) if self._over else 0.0

    def add(self, scaled_error: float) -> bool:
        """Record a run; True when it changed `degraded`."""
        self._over.append(not scaled_error <= self.threshold)
        if len(self._over) < LEAST_RUNS:
            return False
        before, share = self.degraded, self.share
        self.degraded = share > (RECOVERED_SHARE if before else DEGRADED_SHARE)
        return self.degraded is not before
