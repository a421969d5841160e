"""Patience with overflows: how many are let pass before the scale shrinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Hysteresis:
    """Counts overflows on the device of the scale, so that nothing waits for it.

    The count starts at `times`. Each overflow takes one off; while one or more are left after that, the scale stays, and only
    the count of clean steps starts again. At 0 the scale shrinks, and it shrinks again at every further overflow. The count is
    refilled when the scale grows, that is, after `growth_interval` clean steps in a row, and not before: overflows that come
    one by one, with a few clean steps between, add up. `times` = 1 shrinks at every overflow, as torch does.

    Source: the rule of Megatron-LM's `DynamicGradScaler`, and of DeepSpeed's `DynamicLossScaler` unless its
    `consecutive_hysteresis` is set. (apex's kernel refills after any clean step: there, a model that overflows every other step
    would skip half of all steps for ever.)

    Attributes:
        times: As above; at least 1.
        left: The count, an int32 scalar; None until a device is known, and where `times` is 1.
    """

    def __init__(self, times: int) -> None:
        self.times = times
        self.left: Tensor | None = None
        self._initially_left = times

    def move_to(self, device: torch.device) -> None:
        """Put the count on a device."""
        if self.times > 1:
            self.left = torch.full((), self._initially_left, dtype=torch.int32, device=device)

    def absorb(self, found_inf: Tensor, growth_tracker: Tensor) -> Tensor:
        """Count an overflow before the scale is adapted.

        Args:
            found_inf: A scalar that is not 0 after an overflow.
            growth_tracker: The count of clean steps; starts again if the overflow is let pass.

        Returns:
            `found_inf`, or 0 if the overflow is let pass.
        """
        if self.left is None:
            return found_inf
        overflow = found_inf != 0
        self.left.sub_(overflow.int()).clamp_(min=0)
        passes = overflow & (self.left > 0)
        # Adapting will take it for a clean step and add 1.
        growth_tracker.masked_fill_(passes, -1)
        return found_inf.masked_fill(passes, 0.0)

    def refill(self, found_inf: Tensor, growth_tracker: Tensor) -> None:
        """Start again if the scale has just grown: a clean step after which the count of clean steps is 0."""
        if self.left is not None:
            self.left.masked_fill_((found_inf == 0) & (growth_tracker == 0), self.times)

    def get_left(self) -> int:
        """How many are left; waits for the device."""
        return self._initially_left if self.left is None else int(self.left.item())

    def set(self, times: int, left: int) -> None:
        """Set both, `left` cut to what is possible. Afterwards `move_to` a device again, if one is known."""
        self.times, self._initially_left, self.left = times, max(0, min(left, times)), None

    def __getstate__(self) -> dict[str, int | None]:
        return {"times": self.times, "_initially_left": self.get_left(), "left": None}
