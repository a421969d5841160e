"""The loss scale itself: a float32 scalar on the training device that grows and shrinks within limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from amp_core.scaling import scale_settings as checks

if TYPE_CHECKING:
    from torch import Tensor


class LossScale:
    """The scale, the count of steps in a row without an overflow, and the settings that steer both.

    Both live on the device of the first loss, so that adapting them waits for nothing.

    Attributes:
        tensor: The scale, a float32 scalar; None until the first loss is scaled.
        growth_tracker: The count, an int32 scalar; None until then.
    """

    def __init__(
        self,
        *,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        min_scale: float,
        max_scale: float,
    ) -> None:
        self.min_scale, self.max_scale = checks.checked_range(min_scale, max_scale)
        self._initial = checks.checked_scale(init_scale, min_scale, max_scale, "init_scale")
        self._initial_tracker = 0
        self.growth_factor = checks.checked_growth_factor(growth_factor)
        self.backoff_factor = checks.checked_backoff_factor(backoff_factor)
        self.growth_interval = checks.checked_growth_interval(growth_interval)
        self.tensor: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        # Known without asking the device.
        self._at_least = self._initial

    def on(self, device: torch.device) -> Tensor:
        """The scale, on a device; the first such device becomes its home."""
        if self.tensor is None:
            self.tensor = torch.full((), self._initial, dtype=torch.float32, device=device)
            self.growth_tracker = torch.full((), self._initial_tracker, dtype=torch.int32, device=device)
        return self.tensor.to(device, non_blocking=True)

    def scaled(self, outputs: Tensor | Iterable[Any]) -> Any:
        """Multiply a tensor, or every tensor in a nested iterable, with the scale.

        Raises:
            ValueError: If there is anything but tensors and iterables in it.
        """
        if isinstance(outputs, torch.Tensor):
            return outputs * self.on(outputs.device)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scaled, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got a {type(outputs).__name__}")

    def get(self) -> float:
        """The scale as a number; waits for the device."""
        return self._initial if self.tensor is None else float(self.tensor.item())

    def set(self, value: float, name: str) -> None:
        """Set the scale.

        Raises:
            ValueError: If it is not between the limits; names `name`.
        """
        self._initial = self._at_least = checks.checked_scale(value, self.min_scale, self.max_scale, name)
        if self.tensor is not None:
            self.tensor.fill_(value)

    def get_growth_tracker(self) -> int:
        """How many steps in a row had no overflow; waits for the device."""
        return self._initial_tracker if self.growth_tracker is None else int(self.growth_tracker.item())

    def set_growth_interval(self, interval: int, growth_tracker: int) -> None:
        """Set after how many steps in a row without an overflow the scale grows, and how many of them are done.

        Raises:
            ValueError: If the interval is not an integer of at least 1.
        """
        self.growth_interval = checks.checked_growth_interval(interval)
        # torch's kernel grows when the count equals the interval: past it, it would never grow again.
        self._initial_tracker = min(int(growth_tracker), self.growth_interval - 1)
        if self.growth_tracker is not None:
            self.growth_tracker.fill_(self._initial_tracker)

    def adapt(self, found_inf: Tensor) -> None:
        """Shrink the scale if `found_inf`, a float32 scalar, is not zero; else count the step and grow it when it is time."""
        if self.tensor is None or self.growth_tracker is None:
            raise RuntimeError("the scale is adapted before a loss was scaled")
        torch._amp_update_scale_(
            self.tensor, self.growth_tracker, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        self.tensor.clamp_(self.min_scale, self.max_scale)
        self._at_least = max(self._at_least * self.backoff_factor, self.min_scale)

    def may_be_below_one(self) -> bool:
        """Whether dividing by the scale may enlarge a gradient. Waits for the device about once in 16 overflows, at most."""
        if self._at_least < 1.0:
            self._at_least = self.get()
        return self._at_least < 1.0

    def state_dict(self) -> dict[str, Any]:
        """The state under the keys of `torch.amp.GradScaler`."""
        return {
            "scale": self.get(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.get_growth_tracker(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; nothing changes if a value is out of its range.

        Raises:
            ValueError: If one is.
        """
        scale = checks.checked_scale(state["scale"], self.min_scale, self.max_scale, "the loaded scale")
        interval = checks.checked_growth_interval(state["growth_interval"])
        growth_factor = checks.checked_growth_factor(state["growth_factor"])
        self.backoff_factor = checks.checked_backoff_factor(state["backoff_factor"])
        self.growth_factor = growth_factor
        self.set(scale, "the loaded scale")
        self.set_growth_interval(interval, state["_growth_tracker"])

    def __getstate__(self) -> dict[str, Any]:
        here = {"_initial": self.get(), "_initial_tracker": self.get_growth_tracker(), "tensor": None, "growth_tracker": None}
        return self.__dict__ | here
