"""The loss scale itself: a float32 scalar on the training device that grows and shrinks within limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from amp_core.scaling import scale_settings as checks
from amp_core.scaling.hysteresis import Hysteresis
from amp_core.scaling.scale_bound import ScaleBound

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
        hysteresis: int,
    ) -> None:
        self.min_scale, self.max_scale = checks.checked_range(min_scale, max_scale)
        self._initial = checks.checked_scale(init_scale, min_scale, max_scale, "init_scale")
        self._initial_tracker = 0
        self.growth_factor = checks.checked_growth_factor(growth_factor)
        self.backoff_factor = checks.checked_backoff_factor(backoff_factor)
        self.growth_interval = checks.checked_growth_interval(growth_interval)
        self.hysteresis = Hysteresis(checks.checked_count(hysteresis, 1, "hysteresis"))
        self.tensor: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self._bound = ScaleBound(self._initial)
        self._bound_version = 0  # the version of the tensor that the bound is about

    def on(self, device: torch.device) -> Tensor:
        """The scale, on a device; the first such device becomes its home."""
        if self.tensor is None:
            # Not with full: a recorder would take it for one of the model's numbers, in the first step that a process runs.
            self.tensor = torch.tensor(self._initial, dtype=torch.float32, device=device)
            self.growth_tracker = torch.full((), self._initial_tracker, dtype=torch.int32, device=device)
            self.hysteresis.move_to(device)
            self._note_bound(self._initial)
        return self.tensor.to(device, non_blocking=True)

    def needed_by(self, method: str) -> Tensor:
        """The scale where it has been used already.

        Raises:
            RuntimeError: If it has not; names `method`.
        """
        if self.tensor is None:
            raise RuntimeError(
                f"Attempted {method} but _scale is None: call scaler.scale(loss).backward() earlier in the iteration"
            )
        return self.tensor

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

    def snapshot(self) -> float | Tensor:
        """The scale, to be read later: a number where that costs nothing, else a copy on the device."""
        return self.get() if self._is_at_hand() or self.tensor is None else self.tensor.clone()

    def set(self, value: float, name: str) -> None:
        """Set the scale.

        Raises:
            ValueError: If it is not between the limits; names `name`.
        """
        self._initial = checks.checked_scale(value, self.min_scale, self.max_scale, name)
        if self.tensor is not None:
            self.tensor.fill_(value)
            self._note_bound(self._initial)

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
        self._initial_tracker = min(growth_tracker, self.growth_interval - 1)
        if self.growth_tracker is not None:
            self.growth_tracker.fill_(self._initial_tracker)

    def set_hysteresis(self, times: int, left: int) -> None:
        """Set how many overflows in all shrink the scale, and how many of them are to come."""
        self.hysteresis.set(times, left)
        if self.tensor is not None:
            self.hysteresis.move_to(self.tensor.device)

    def adapt(self, found_inf: Tensor, *, overflowed: bool | None = None) -> None:
        """Shrink the scale after an overflow, or count the step and grow it when it is time.

        Args:
            found_inf: A float32 scalar that is not 0 after an overflow.
            overflowed: The same, if the host knows.
        """
        if self.tensor is None or self.growth_tracker is None:
            raise RuntimeError("the scale is adapted before a loss was scaled")
        found = self.hysteresis.absorb(found_inf, self.growth_tracker)
        torch._amp_update_scale_(
            self.tensor, self.growth_tracker, found, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        self.hysteresis.refill(found_inf, self.growth_tracker)
        if not self._is_at_hand():
            bound_holds = self.tensor._version == self._bound_version + 1  # noqa: SLF001  (the only mark of a foreign write)
            self.tensor.clamp_(self.min_scale, self.max_scale)
            if bound_holds:
                self._bound.follow(
                    self.tensor, shrink=1.0 if overflowed is False else self.backoff_factor, floor=self.min_scale
                )
                self._bound_version = self.tensor._version  # noqa: SLF001  (see above)
        elif not self.min_scale <= self.tensor.item() <= self.max_scale:
            self.tensor.clamp_(self.min_scale, self.max_scale)

    def may_be_below_one(self) -> bool:
        """Whether dividing by the scale may enlarge a gradient. Never waits for an accelerator that it knows the scale of."""
        return self.min_scale < 1.0 and self._at_least() < 1.0

    def is_smallest(self) -> bool:
        """Whether the scale cannot shrink. Waits for an accelerator only if that is near."""
        return self._at_least() <= self.min_scale and self.get() <= self.min_scale

    def state_dict(self) -> dict[str, Any]:
        """The state under the keys of `torch.amp.GradScaler`, and two more where there is hysteresis."""
        state = {
            "scale": self.get(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.get_growth_tracker(),
        }
        hysteresis = {"hysteresis": self.hysteresis.times, "_hysteresis_left": self.hysteresis.get_left()}
        return state | hysteresis if self.hysteresis.times > 1 else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; nothing changes if a value is out of its range.

        Raises:
            ValueError: If one is.
        """
        scale = checks.checked_scale(state["scale"], self.min_scale, self.max_scale, "the loaded scale")
        interval = checks.checked_growth_interval(state["growth_interval"])
        tracker = checks.checked_count(state["_growth_tracker"], 0, "the loaded _growth_tracker")
        growth_factor = checks.checked_growth_factor(state["growth_factor"])
        times = checks.checked_count(state.get("hysteresis", self.hysteresis.times), 1, "the loaded hysteresis")
        left = checks.checked_count(state.get("_hysteresis_left", times), 0, "the loaded _hysteresis_left")
        self.backoff_factor = checks.checked_backoff_factor(state["backoff_factor"])
        self.growth_factor = growth_factor
        self.set(scale, "the loaded scale")
        self.set_growth_interval(interval, tracker)
        self.set_hysteresis(times, left)

    def _is_at_hand(self) -> bool:
        """Whether reading the scale waits for nothing."""
        return self.tensor is not None and self.tensor.device.type == "cpu"

    def _at_least(self) -> float:
        if self.tensor is None or self._is_at_hand():
            return self.get()
        if self.tensor._version != self._bound_version:  # noqa: SLF001  (frameworks write to GradScaler._scale)
            self._note_bound(self.get())
        return self._bound.at_least

    def _note_bound(self, value: float) -> None:
        self._bound.reset(value)
        if self.tensor is not None:
            self._bound_version = self.tensor._version  # noqa: SLF001  (see above)

    def __getstate__(self) -> dict[str, Any]:
        here = {"_initial": self.get(), "_initial_tracker": self.get_growth_tracker(), "tensor": None, "growth_tracker": None}
        return self.__dict__ | here | {"_bound": ScaleBound(self.get())}
