"""The part of `GradScaler` that is about the scale and its settings, whatever is done with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_core.scaling import scale_settings as checks
from amp_core.scaling.loss_scale import LossScale


class ScaleInterface:
    """Getters, setters and the state; see `GradScaler`.

    Args:
        loss_scale: The scale.
        enabled: Whether it is used.
    """

    def __init__(self, loss_scale: LossScale, *, enabled: bool) -> None:
        self._loss_scale = loss_scale
        self._enabled = enabled

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """The current scale, 1.0 if disabled. Waits for the device."""
        return self._loss_scale.get() if self._enabled else 1.0

    @property
    def min_scale(self) -> float:
        """The scale never shrinks below this."""
        return self._loss_scale.min_scale

    @property
    def max_scale(self) -> float:
        """The scale never grows above this."""
        return self._loss_scale.max_scale

    @property
    def hysteresis(self) -> int:
        """How many overflows shrink the scale; see `GradScaler`."""
        return self._loss_scale.hysteresis.times

    def get_growth_factor(self) -> float:
        """What the scale is multiplied with when it grows."""
        return self._loss_scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied with when it grows.

        Raises:
            ValueError: If that is not a finite number above 1.
        """
        self._loss_scale.growth_factor = checks.checked_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied with after an overflow."""
        return self._loss_scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied with after an overflow.

        Raises:
            ValueError: If that is not between 0 and 1.
        """
        self._loss_scale.backoff_factor = checks.checked_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """After how many steps in a row without an overflow the scale grows."""
        return self._loss_scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many steps in a row without an overflow the scale grows.

        Steps already counted still count: if there are enough of them, the scale grows after the next.

        Raises:
            ValueError: If that is not an integer of at least 1.
        """
        self._loss_scale.set_growth_interval(new_interval, self._loss_scale.get_growth_tracker())

    def state_dict(self) -> dict[str, Any]:
        """The state under torch's keys, to be taken after `update`; empty if disabled.

        With a hysteresis above 1 it holds two keys more, which torch ignores. The history is not part of it.
        """
        return self._loss_scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this class or torch's has written; does nothing if disabled.

        A state of torch's leaves the hysteresis as it is set, with none of its overflows used up.

        Raises:
            RuntimeError: If it is empty, lacks a key, or is no dictionary.
            ValueError: If a value in it is out of its range.
        """
        if not self._enabled:
            return
        expected = "expected what GradScaler.state_dict() returns"
        if not isinstance(state_dict, Mapping):
            raise RuntimeError(f"The source state dict is a {type(state_dict).__name__}; {expected}")  # noqa: TRY004  (as torch's)
        if not state_dict:
            raise RuntimeError("The source state dict is empty, possibly because it was saved from a disabled GradScaler.")
        missing = sorted({"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} - state_dict.keys())
        if missing:
            raise RuntimeError(f"The source state dict lacks {', '.join(missing)}; {expected}")
        self._loss_scale.load_state_dict(state_dict)

    # From here on: names of torch's that training frameworks reach for.

    @property
    def _scale(self) -> Tensor | None:
        return self._loss_scale.tensor

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._loss_scale.growth_tracker

    def _get_scale_async(self) -> Tensor | None:
        return self._loss_scale.tensor

    def _get_growth_tracker(self) -> int:
        return self._loss_scale.get_growth_tracker() if self._enabled else 0

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self._loss_scale.on(torch.device(dev))

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._loss_scale.needed_by(funcname), self._loss_scale.growth_tracker
        assert tracker is not None  # noqa: S101  (made together with the scale)
        return scale, tracker


def device_type(device: str | torch.device | None) -> str:
    """The kind of a device; by default the accelerator in use, else the CPU.

    Raises:
        ValueError: If there is no such kind of device.
    """
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be the name of a device type, such as 'cuda' or 'cpu', got {device!r}") from None
