"""What the host knows about a scale on an accelerator, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Asks a reading that was begun: the number, or None while the device has not come to it.
Reading = Callable[[], float | None]
# Far enough above 1 that a reading is back before eight halvings bring the bound there.
READ_BELOW = 256.0


class ScaleBound:
    """A number that the scale is surely not below.

    It shrinks with every overflow, and with every step of which the host does not know whether it overflowed. When it gets low,
    the scale is read in the background, and the bound rises again when the number is there.

    Args:
        at_least: The scale at first.
        begin_reading: Starts to read a scalar; see `begin_reading`.
    """

    def __init__(self, at_least: float, begin_reading: Callable[[Tensor], Reading] | None = None) -> None:
        self.at_least = at_least
        self._begin_reading = begin_reading or _begin_reading
        self._reading: Reading | None = None
        self._shrunk_since = 1.0

    def reset(self, value: float) -> None:
        """Take over a scale that is known."""
        self.at_least, self._reading = value, None

    def follow(self, scale: Tensor, *, shrink: float, floor: float) -> None:
        """Keep up with a scale that has just been adapted.

        Args:
            scale: The scale, a scalar.
            shrink: The smallest factor that may have been applied to it.
            floor: What it cannot have fallen below.
        """
        self.at_least = max(self.at_least * shrink, floor)
        self._shrunk_since *= shrink
        value = self._reading() if self._reading else None
        if value is not None:
            self.at_least, self._reading = max(self.at_least, value * self._shrunk_since), None
        if self._reading is None and self.at_least < READ_BELOW:
            self._reading, self._shrunk_since = self._begin_reading(scale), 1.0


def _begin_reading(scalar: Tensor) -> Reading:
    """Copy a scalar to the host, in the background where the device has streams."""
    if scalar.device.type not in {"cuda", "xpu"}:
        return scalar.detach().clone().item
    copy = scalar.to("cpu", non_blocking=True)
    done = torch.get_device_module(scalar.device).current_stream(scalar.device).record_event()
    return lambda: copy.item() if done.query() else None
