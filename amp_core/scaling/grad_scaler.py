"""`GradScaler`: keeps small float16 gradients from vanishing, and non-finite ones out of the parameters."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from amp_core.scaling.gradients import bucket_gradients, check_and_unscale_
from amp_core.scaling.loss_scale import LossScale
from amp_core.scaling.optimizer_state import FOUND, OptState, fused_step, refresh_per_optimizer_state, takes_scale
from amp_core.scaling.scale_settings import DEFAULT_MIN_SCALE, LARGEST_SCALE, checked_backoff_factor, checked_growth_factor
from amp_core.scaling.step_outcomes import StepOutcomes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Outputs = TypeVar("Outputs", bound="Tensor | Iterable[Any]")


class GradScaler:
    """Scales the loss up before backward, and unscales, checks and skips before the optimizer's step.

    Drop-in for `torch.amp.GradScaler`: the same methods, the same numbers step for step, exchangeable `state_dict`s. It differs
    where torch goes wrong: the scale keeps within [min_scale, max_scale]; a gradient that becomes non-finite by unscaling is
    found too; closures are refused however they are passed; settings are checked; `update` takes any number; and it answers
    whether a step was skipped and which parameters overflowed.

    Example:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped:
            scheduler.step()

    Args:
        device: The kind of device that training runs on; by default the accelerator in use, else the CPU.
        init_scale: The scale at first.
        growth_factor: Multiplies the scale after `growth_interval` steps in a row without an overflow. Above 1.
        backoff_factor: Multiplies the scale after an overflow. Between 0 and 1.
        growth_interval: In steps, at least 1.
        enabled: False passes everything through.
        min_scale: The scale never shrinks below this.
        max_scale: The scale never grows above this.

    Raises:
        ValueError: If a setting is out of its range.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = DEFAULT_MIN_SCALE,
        max_scale: float = LARGEST_SCALE,
    ) -> None:
        self._device = device or _device_in_use()
        self._enabled = enabled
        if enabled and self._device == "cuda" and not torch.cuda.is_available():
            warnings.warn("GradScaler is enabled for cuda, but CUDA is not available. Disabling.", stacklevel=2)
            self._enabled = False
        self._loss_scale = LossScale(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(refresh_per_optimizer_state)
        self._outcomes = StepOutcomes()

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or every tensor in a nested iterable, with the scale.

        Returns:
            The same structure; lists and tuples keep their types, other iterables become iterators.

        Raises:
            ValueError: If there is anything but tensors and iterables in it.
        """
        return cast("Outputs", self._loss_scale.scaled(outputs)) if self._enabled else outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place, so that they can be clipped or looked at.

        Raises:
            RuntimeError: If called twice, or after `step`, in one iteration, or before `scale`.
            ValueError: If a gradient is float16.
        """
        if not self._enabled:
            return
        scale = self._check_scale("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        # In double precision, and rounded once: the quotient of two float32 is not exact for every scale.
        inverse_scale, found_inf = scale.double().reciprocal().float(), torch.zeros_like(scale)
        state[FOUND] = self._unscale_grads_(optimizer, inverse_scale, found_inf, allow_fp16=False)
        state["stage"] = OptState.UNSCALED
        self._outcomes.note(optimizer, state[FOUND].values(), look_now=not takes_scale(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients unless that is done, and step the optimizer if all of them are finite.

        Returns:
            What `optimizer.step(*args, **kwargs)` returns; None if the step was skipped.

        Raises:
            RuntimeError: If given a closure, called twice in one iteration, or before `scale`, or if there is no gradient.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        if kwargs.get("closure") is not None or any(callable(value) for value in args):
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled: its losses would stay scaled. "
                "Use an optimizer that needs no closure, or a disabled GradScaler"
            )
        scale = self._check_scale("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            # A fused optimizer unscales by itself, without looking at the result; below 1 the result may overflow.
            if takes_scale(optimizer) and not self._loss_scale.may_be_below_one():
                self._check_inf_per_device(optimizer)
                self._outcomes.note(optimizer, state[FOUND].values(), look_now=False)
            else:
                self.unscale_(optimizer)
        if not state[FOUND]:
            raise RuntimeError("No inf checks were recorded for this optimizer: none of its parameters has a gradient")
        if takes_scale(optimizer):
            result = fused_step(optimizer, state, scale, *args, **kwargs)
        else:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: shrink the scale after an overflow, grow it after `growth_interval` steps without.

        Args:
            new_scale: Sets the scale to this instead: a number, or a tensor with one element.

        Raises:
            ValueError: If `new_scale` is not a number between `min_scale` and `max_scale`.
            RuntimeError: If no optimizer's gradients were checked in this iteration.
        """
        if not self._enabled:
            return
        scale = self._check_scale("update")
        if new_scale is not None:
            value = new_scale.item() if isinstance(new_scale, Tensor) and new_scale.numel() == 1 else new_scale
            self._loss_scale.set(cast("float", value), "new_scale")
        else:
            found = [flag.to(scale.device) for state in self._per_optimizer_states.values() for flag in state[FOUND].values()]
            if not found:
                raise RuntimeError("No inf checks were recorded prior to update: call scaler.step(optimizer) first")
            self._loss_scale.adapt(torch.stack(found).sum())
        self._per_optimizer_states = defaultdict(refresh_per_optimizer_state)
        self._outcomes.end_iteration()

    @property
    def step_was_skipped(self) -> bool:
        """Whether any optimizer's step was skipped in this iteration, or in the last one until the next begins."""
        return self._outcomes.skipped()

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether the step of one of several optimizers was skipped; see `step_was_skipped`."""
        return self._outcomes.skipped(optimizer)

    def overflowed_parameters(self, model: nn.Module | None = None) -> list[str]:
        """Name the parameters whose gradients were not finite when the last step was skipped; empty if none was.

        With a fused optimizer the gradients are looked at now, so ask before they are cleared.

        Args:
            model: Whose parameters' names to use; else the optimizer's own names or their places in its groups.
        """
        return self._outcomes.overflowed_parameters(model)

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

    def get_growth_factor(self) -> float:
        """What the scale is multiplied with when it grows."""
        return self._loss_scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied with when it grows; ValueError if that is not above 1."""
        self._loss_scale.growth_factor = checked_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied with after an overflow."""
        return self._loss_scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied with after an overflow; ValueError if that is not between 0 and 1."""
        self._loss_scale.backoff_factor = checked_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """After how many steps in a row without an overflow the scale grows."""
        return self._loss_scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many steps in a row without an overflow the scale grows; ValueError unless an integer >= 1.

        Steps already counted still count: if there are enough of them, the scale grows after the next.
        """
        self._loss_scale.set_growth_interval(new_interval, self._loss_scale.get_growth_tracker())

    def is_enabled(self) -> bool:
        """Whether this scaler does anything."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state under torch's keys, to be taken after `update`; empty if disabled."""
        return self._loss_scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this class or torch's has written; does nothing if disabled.

        Raises:
            RuntimeError: If it is empty or lacks a key.
            ValueError: If a value in it is out of its range.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("The source state dict is empty, possibly because it was saved from a disabled GradScaler.")
        missing = sorted(self.state_dict().keys() - state_dict.keys())
        if missing:
            raise RuntimeError(
                f"The source state dict lacks {', '.join(missing)}; expected what GradScaler.state_dict() returns"
            )
        self._loss_scale.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise RuntimeError("A GradScaler may only be pickled at the beginning of an iteration, or after scaler.update().")
        return self.__dict__ | {"_outcomes": StepOutcomes()}

    # From here on: names of torch's that training frameworks reach for.

    @property
    def _scale(self) -> Tensor | None:
        return self._loss_scale.tensor

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._loss_scale.growth_tracker

    def _get_scale_async(self) -> Tensor | None:
        return self._loss_scale.tensor

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        buckets = bucket_gradients(optimizer, allow_fp16=allow_fp16)
        return check_and_unscale_(buckets, inv_scale, found_inf, recheck=self._loss_scale.may_be_below_one())

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> float | None:
        if any(found.item() for found in optimizer_state[FOUND].values()):
            return None
        return cast("float | None", optimizer.step(*args, **kwargs))

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        scale = self._check_scale("_check_inf_per_device")
        state = self._per_optimizer_states[id(optimizer)]
        state[FOUND] = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), allow_fp16=True)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = self._per_optimizer_states[id(optimizer)][FOUND]
        return found

    def _check_scale(self, method: str) -> Tensor:
        if self._scale is None:
            raise RuntimeError(
                f"Attempted {method} but _scale is None: call scaler.scale(loss).backward() earlier in the iteration"
            )
        return self._scale


def _device_in_use() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
