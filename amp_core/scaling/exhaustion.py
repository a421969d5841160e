"""What to do when a gradient overflows at the smallest scale, so that no scale can help."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from amp_core.scaling.parameter_names import listed
from amp_core.scaling.scale_settings import OnMinScale

if TYPE_CHECKING:
    from amp_core.scaling.loss_scale import LossScale
    from amp_core.scaling.step_outcomes import Outcome


class Exhaustion:
    """Notices an overflow at the smallest scale, and warns, raises or sets a flag.

    Args:
        action: "warn" once, until the scale has grown again; "raise"; or "stop": set the flag.

    Attributes:
        should_stop: The flag.
    """

    def __init__(self, action: OnMinScale) -> None:
        self.should_stop = False
        self._action = action
        self._has_warned = False

    def message(self, loss_scale: LossScale, outcomes: list[Outcome]) -> str | None:
        """What is to be told about an iteration, before its scale is adapted; None if it has nothing to tell.

        Waits for an accelerator only if the host does not know of a step, and the scale is near its smallest.
        """
        if all(outcome.known() is False for outcome in outcomes):
            return None
        if not loss_scale.is_smallest():
            self._has_warned = False
            return None
        overflowed = [outcome for outcome in outcomes if outcome.overflowed()]
        if not overflowed:
            return None
        names = listed([name for outcome in overflowed for name in outcome.names()]) or "a parameter"
        return (
            f"The gradients of {names} are not finite even at the smallest scale, {loss_scale.get():g}: "
            "no scale can help. Look for NaN in the data and the loss; try bfloat16, a lower learning rate, "
            "or an autocast policy that keeps the overflowing operations in float32"
        )

    def act(self, message: str) -> None:
        """Tell it.

        Raises:
            FloatingPointError: If that is the action.
        """
        if self._action == "raise":
            raise FloatingPointError(message)
        self.should_stop = self._action == "stop"
        if self._action == "warn" and not self._has_warned:
            self._has_warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=3)
