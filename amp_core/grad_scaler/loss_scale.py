"""The loss scale: a float32 scalar on the training device that grows and shrinks within limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

OnMinScale = Literal["warn", "raise", "stop"]
Hook = TypeVar("Hook", bound=Any)

# Below the smallest, the reciprocal of a scale is not a finite float32; above the largest, the scale itself is not.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**127
# The smallest normal float16: a loss that overflows even with this factor cannot be helped by scaling.
DEFAULT_MIN_SCALE = 2.0**-14


def checked_growth_factor(value: float) -> float:
    if not _is_number(value) or not 1.0 < value < math.inf:
        raise ValueError(f"The growth factor must be > 1.0 and finite, got {value!r}")
    return value


def checked_backoff_factor(value: float) -> float:
    if not _is_number(value) or not 0.0 < value < 1.0:
        raise ValueError(f"The backoff factor must be < 1.0 and > 0.0, got {value!r}")
    return value


def checked_growth_interval(value: int) -> int:
    return checked_count(value, 1, "The growth interval")


def checked_range(min_scale: float, max_scale: float) -> tuple[float, float]:
    ok = _is_number(min_scale) and _is_number(max_scale) and SMALLEST_SCALE <= min_scale <= max_scale <= LARGEST_SCALE
    if not ok:
        raise ValueError(f"expected 2**-126 <= min_scale <= max_scale <= 2**127, got {min_scale!r} and {max_scale!r}")
    return min_scale, max_scale


def checked_scale(value: float, low: float, high: float, name: str) -> float:
    if not _is_number(value) or not low <= value <= high:
        raise ValueError(f"{name} must be between min_scale {low:g} and max_scale {high:g}, got {value!r}")
    return float(value)


def number_of(value: float | Tensor, name: str) -> Any:
    """Return the number in a one-element tensor; anything else unchanged, for `checked_scale` to judge. Waits for the device.

    Raises:
        ValueError: If the tensor requires a gradient.
    """
    if not isinstance(value, Tensor) or value.numel() != 1:
        return value
    if value.requires_grad:
        raise ValueError(f"{name} must be a number or a tensor that requires no gradient, got {value!r}; pass {name}.detach()")
    return value.item()


def checked_count(value: int, least: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return value


def checked_on_min_scale(value: OnMinScale) -> OnMinScale:
    if value not in get_args(OnMinScale):
        raise ValueError(f"on_min_scale must be 'warn', 'raise' or 'stop', got {value!r}")
    return value


def checked_hook(value: Hook, name: str) -> Hook:
    given: object = value
    if given is not None and not callable(given):
        raise ValueError(f"{name} must be a function of a tensor, or None, got {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Hysteresis:
    """The number of overflows that pass before the scale shrinks, counted on the scale's device without waiting for it.

    The count starts at `times` and each overflow subtracts one. While the count is above 0 the scale stays, and only the count
    of clean steps restarts. At 0 the scale shrinks, and again at every further overflow. The count is refilled only when the
    scale grows, after `growth_interval` clean steps in a row, so sporadic overflows add up. With `times` = 1 the scale shrinks
    at every overflow, as torch's does.

    Source: Megatron-LM's `DynamicGradScaler`, and DeepSpeed's `DynamicLossScaler` without `consecutive_hysteresis`. (apex
    refills after any clean step: a model that overflows every other step would skip half of all steps forever.)

    Attributes:
        times: The number of overflows until the scale shrinks, at least 1.
        left: The count, an int32 scalar; None until a device is known, and where `times` is 1.
    """

    def __init__(self, times: int) -> None:
        self.times = times
        self.left: Tensor | None = None
        self._initially_left = times

    def move_to(self, device: torch.device) -> None:
        if self.times > 1:
            self.left = torch.full((), self._initially_left, dtype=torch.int32, device=device)

    def absorb(self, found_inf: Tensor, growth_tracker: Tensor) -> Tensor:
        """Count an overflow before the scale is adapted; returns `found_inf`, or 0 if the overflow passes."""
        if self.left is None:
            return found_inf
        overflow = found_inf != 0
        self.left.sub_(overflow.int()).clamp_(min=0)
        passes = overflow & (self.left > 0)
        # Adapting counts it as a clean step and adds 1.
        growth_tracker.masked_fill_(passes, -1)
        return found_inf.masked_fill(passes, 0.0)

    def refill(self, found_inf: Tensor, growth_tracker: Tensor) -> None:
        """Refill the count if the scale has just grown: after a clean step, the count of clean steps is 0."""
        if self.left is not None:
            self.left.masked_fill_((found_inf == 0) & (growth_tracker == 0), self.times)

    def get_left(self) -> int:
        """Return the count as a number; waits for the device."""
        return self._initially_left if self.left is None else int(self.left.item())

    def set(self, times: int, left: int) -> None:
        """Set both counts; `left` is clamped to [0, times]. Call `move_to` afterwards if a device is known."""
        self.times, self._initially_left, self.left = times, max(0, min(left, times)), None

    def __getstate__(self) -> dict[str, int | None]:
        return {"times": self.times, "_initially_left": self.get_left(), "left": None}


# Polls an asynchronous read of a scalar: the number, or None until the device has reached it.
Reading = Callable[[], float | None]
# Far enough above 1 that a read completes before eight halvings bring the bound to 1.
READ_BELOW = 256.0


class ScaleBound:
    """A lower bound of the scale that the host knows without waiting for the accelerator.

    The bound shrinks with every overflow, and with every step whose overflow the host does not know. When the bound is low, the
    scale is read in the background, and the bound rises when the number arrives.
    """

    def __init__(self, at_least: float, begin_reading: Callable[[Tensor], Reading] | None = None) -> None:
        self.at_least = at_least
        self._begin_reading = begin_reading or _begin_reading
        self._reading: Reading | None = None
        self._shrunk_since = 1.0

    def reset(self, value: float) -> None:
        self.at_least, self._reading = value, None

    def follow(self, scale: Tensor, *, shrink: float, floor: float) -> None:
        """Update the bound after the scale was adapted: it may have shrunk by the factor `shrink`, but not below `floor`."""
        self.at_least = max(self.at_least * shrink, floor)
        self._shrunk_since *= shrink
        value = self._reading() if self._reading else None
        if value is not None:
            self.at_least, self._reading = max(self.at_least, value * self._shrunk_since), None
        if self._reading is None and self.at_least < READ_BELOW:
            self._reading, self._shrunk_since = self._begin_reading(scale), 1.0


def _begin_reading(scalar: Tensor) -> Reading:
    """Copy a scalar to the host, asynchronously where the device has streams; the result returns None until it is there."""
    if scalar.device.type not in {"cuda", "xpu"}:
        return scalar.detach().clone().item
    copy = scalar.to("cpu", non_blocking=True)
    done = torch.get_device_module(scalar.device).current_stream(scalar.device).record_event()
    return lambda: copy.item() if done.query() else None


class LossScale:
    """The scale, the count of steps in a row without an overflow, and the settings of both.

    Both live on the device of the first loss, so that adapting them does not wait for the device.

    Attributes:
        tensor: The scale, a float32 scalar; None until the first loss is scaled.
        growth_tracker: The count, an int32 scalar; None until the first loss is scaled.
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
        self.min_scale, self.max_scale = checked_range(min_scale, max_scale)
        self._initial = checked_scale(init_scale, min_scale, max_scale, "init_scale")
        self._initial_tracker = 0
        self.growth_factor = checked_growth_factor(growth_factor)
        self.backoff_factor = checked_backoff_factor(backoff_factor)
        self.growth_interval = checked_growth_interval(growth_interval)
        self.hysteresis = Hysteresis(checked_count(hysteresis, 1, "hysteresis"))
        self.tensor: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self._bound = ScaleBound(self._initial)
        self._bound_version = 0  # the version of the tensor that the bound describes

    def on(self, device: torch.device) -> Tensor:
        """Return the scale on a device; the first such device becomes its home."""
        if self.tensor is None:
            # torch.full would be recorded as one of the model's operations in the first step of a process; torch.tensor is not.
            self.tensor = torch.tensor(self._initial, dtype=torch.float32, device=device)
            self.growth_tracker = torch.full((), self._initial_tracker, dtype=torch.int32, device=device)
            self.hysteresis.move_to(device)
            self._note_bound(self._initial)
        return self.tensor.to(device, non_blocking=True)

    def needed_by(self, method: str) -> Tensor:
        """Return the scale, which a loss must have used already.

        Raises:
            RuntimeError: If no loss was scaled; names `method`.
        """
        if self.tensor is None:
            raise RuntimeError(
                f"Attempted {method} but _scale is None: call scaler.scale(loss).backward() earlier in the iteration"
            )
        return self.tensor

    def scaled(self, outputs: Tensor | Iterable[Any]) -> Any:
        """Multiply a tensor, or every tensor in a nested iterable, by the scale.

        Raises:
            ValueError: If it contains anything but tensors and iterables.
        """
        if isinstance(outputs, torch.Tensor):
            return outputs * self.on(outputs.device)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scaled, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got a {type(outputs).__name__}")

    def get(self) -> float:
        """Return the scale as a number; waits for the device."""
        return self._initial if self.tensor is None else float(self.tensor.item())

    def snapshot(self) -> float | Tensor:
        """Return the scale for later reading: a number on the CPU, else a copy on the device."""
        return self.get() if self._is_at_hand() or self.tensor is None else self.tensor.clone()

    def set(self, value: float, name: str) -> None:
        self._initial = checked_scale(value, self.min_scale, self.max_scale, name)
        if self.tensor is not None:
            self.tensor.fill_(value)
            self._note_bound(self._initial)

    def get_growth_tracker(self) -> int:
        """Return the number of steps in a row without an overflow; waits for the device."""
        return self._initial_tracker if self.growth_tracker is None else int(self.growth_tracker.item())

    def set_growth_interval(self, interval: int, growth_tracker: int) -> None:
        """Set the number of clean steps after which the scale grows, and how many of them are done."""
        self.growth_interval = checked_growth_interval(interval)
        # torch's kernel grows when the count equals the interval: past it, it would never grow again.
        self._initial_tracker = min(growth_tracker, self.growth_interval - 1)
        if self.growth_tracker is not None:
            self.growth_tracker.fill_(self._initial_tracker)

    def set_hysteresis(self, times: int, left: int) -> None:
        self.hysteresis.set(times, left)
        if self.tensor is not None:
            self.hysteresis.move_to(self.tensor.device)

    def adapt(self, found_inf: Tensor, *, overflowed: bool | None = None) -> None:
        """Shrink the scale after an overflow, or count the step and grow the scale when it is time.

        `found_inf` is a float32 scalar that is not 0 after an overflow; `overflowed` says the same, if the host knows.
        """
        if self.tensor is None or self.growth_tracker is None:
            raise RuntimeError("the scale is adapted before a loss was scaled")
        found = self.hysteresis.absorb(found_inf, self.growth_tracker)
        torch._amp_update_scale_(
            self.tensor, self.growth_tracker, found, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        self.hysteresis.refill(found_inf, self.growth_tracker)
        if not self._is_at_hand():
            bound_holds = self.tensor._version == self._bound_version + 1  # noqa: SLF001  (the only sign of a foreign write)
            self.tensor.clamp_(self.min_scale, self.max_scale)
            if bound_holds:
                self._bound.follow(
                    self.tensor, shrink=1.0 if overflowed is False else self.backoff_factor, floor=self.min_scale
                )
                self._bound_version = self.tensor._version  # noqa: SLF001  (see above)
        elif not self.min_scale <= self.tensor.item() <= self.max_scale:
            self.tensor.clamp_(self.min_scale, self.max_scale)

    def may_be_below_one(self) -> bool:
        """Return whether dividing by the scale may enlarge a gradient. Waits only after a foreign write to the scale."""
        return self.min_scale < 1.0 and self._at_least() < 1.0

    def is_smallest(self) -> bool:
        """Return whether the scale is at its minimum. Waits for an accelerator only if the minimum is near."""
        return self._at_least() <= self.min_scale and self.get() <= self.min_scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the keys of `torch.amp.GradScaler`, with two more keys if there is hysteresis."""
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
        """Load a state.

        Raises:
            ValueError: If a value is out of its range; nothing is changed then.
        """
        scale = checked_scale(state["scale"], self.min_scale, self.max_scale, "the loaded scale")
        interval = checked_growth_interval(state["growth_interval"])
        tracker = checked_count(state["_growth_tracker"], 0, "the loaded _growth_tracker")
        growth_factor = checked_growth_factor(state["growth_factor"])
        times = checked_count(state.get("hysteresis", self.hysteresis.times), 1, "the loaded hysteresis")
        left = checked_count(state.get("_hysteresis_left", times), 0, "the loaded _hysteresis_left")
        self.backoff_factor = checked_backoff_factor(state["backoff_factor"])
        self.growth_factor = growth_factor
        self.set(scale, "the loaded scale")
        self.set_growth_interval(interval, tracker)
        self.set_hysteresis(times, left)

    def _is_at_hand(self) -> bool:
        """Return whether reading the scale waits for nothing."""
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
