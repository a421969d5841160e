"""accelerate's optimizer, with the scaler's own answer to whether a step was skipped."""

from __future__ import annotations

from accelerate.optimizer import AcceleratedOptimizer


class ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate ships no types
    """An `AcceleratedOptimizer` that asks the scaler, which also knows what a fused optimizer has skipped in its own kernel."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self.scaler is not None and bool(self.scaler.skipped(self.optimizer))
