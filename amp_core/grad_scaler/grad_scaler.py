"""`GradScaler`: keeps small float16 gradients from underflowing, and non-finite ones out of the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfserve.amp_core.grad_scaler.loss_scale import (
    DEFAULT_MIN_SCALE,
    LARGEST_SCALE,
    LossScale,
    OnMinScale,
    checked_backoff_factor,
    checked_count,
    checked_growth_factor,
    checked_hook,
    checked_on_min_scale,
    number_of,
)
from halfserve.amp_core.grad_scaler.optimizers import FOUND, total
from halfserve.amp_core.grad_scaler.outcomes import Exhaustion, ScaleHistory, ScaleRecord, StepOutcomes
from halfserve.amp_core.grad_scaler.stepper import CONTRACT, Stepper, split_closure

Outputs = TypeVar("Outputs", bound="Tensor | Iterable[Any]")


def device_type(device: str | torch.device | None) -> str:
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be the name of a device type, such as 'cuda' or 'cpu', got {device!r}") from None


class GradScaler:
    """Scales the loss before backward; unscales and checks the gradients, and steps only if all are finite.

    Drop-in for `torch.amp.GradScaler`: the same methods, the same numbers step for step, exchangeable `state_dict`s.
    Differences, where torch goes wrong: the scale stays within [min_scale, max_scale]; a gradient that overflows by unscaling
    is found; a closure is evaluated on scaled losses or refused; settings are checked; `update` takes any number; and the
    scaler answers whether a step was skipped and which parameters overflowed.

    Example::

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped:
            scheduler.step()

    Args:
        device: The device type of the training; by default the accelerator in use, else the CPU.
        init_scale: The initial scale.
        growth_factor: Multiplies the scale after `growth_interval` steps in a row without an overflow. Above 1.
        backoff_factor: Multiplies the scale after an overflow. Between 0 and 1.
        growth_interval: The number of steps in a row without an overflow before the scale grows, at least 1.
        enabled: False disables scaling and checking: all calls pass their arguments through.
        min_scale: The scale never shrinks below this.
        max_scale: The scale never grows above this.
        hysteresis: The scale shrinks at the overflow with this number and at every further one, counted until the scale grows
            again (Megatron-LM's rule: clean steps in between do not restart the count). Earlier overflows still skip the step
            and restart `growth_interval`. 1 shrinks at every overflow, as torch does.
        on_min_scale: What `update` does after an overflow at `min_scale`, when no scale can help: "warn", once until the scale
            has grown again; "raise" FloatingPointError, with the iteration ended and the step skipped; or "stop", which sets
            `should_stop`. All name the parameters.
        history_size: The number of iterations in `history`.
        allow_fp16_gradients: Unscale float16 gradients, too, as of a model cast by .half(). They are unscaled in place, where
            small ones underflow. The parameters are then guarded as by `guard_parameters`.
        guard_parameters: Undo a step that makes a parameter non-finite out of finite gradients, as too high a learning rate
            does; warn, and count it as skipped, but keep the scale. Costs a copy of the parameters and of the optimizer's state
            at each step, and waits for the device.
        reduce_found_inf: Called after each check with a float32 scalar per device, 1.0 if a gradient on it is not finite, else
            0.0, to change in place: `lambda found: torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)` makes
            all ranks skip together, where each has only a shard of the gradients. Also called for an optimizer without
            gradients, so that no rank waits in vain, and once more after a guarded step and a step with a closure, with 1.0 if
            it is to be undone.

    Raises:
        ValueError: If a setting is out of its range.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = DEFAULT_MIN_SCALE,
        max_scale: float = LARGEST_SCALE,
        hysteresis: int = 1,
        on_min_scale: OnMinScale = "warn",
        history_size: int = 1000,
        allow_fp16_gradients: bool = False,
        guard_parameters: bool = False,
        reduce_found_inf: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self._device = device_type(device)
        if enabled and self._device == "cuda" and not torch.cuda.is_available():
            warnings.warn("GradScaler is enabled for cuda, but CUDA is not available. Disabling.", stacklevel=2)
            enabled = False
        loss_scale = LossScale(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
        )
        self._loss_scale, self._enabled = loss_scale, enabled
        self._exhaustion = Exhaustion(checked_on_min_scale(on_min_scale))
        self._history = ScaleHistory(checked_count(history_size, 0, "history_size"))
        self._outcomes = StepOutcomes()
        self._stepper = Stepper(
            loss_scale,
            self._outcomes,
            allow_fp16=allow_fp16_gradients,
            guards=guard_parameters,
            reduce_found_inf=checked_hook(reduce_found_inf, "reduce_found_inf"),
        )

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or every tensor in a nested iterable, by the scale.

        Returns:
            The same structure; lists and tuples keep their types, other iterables become iterators.

        Raises:
            ValueError: If it contains anything but tensors and iterables.
            RuntimeError: If called by a closure.
        """
        if not self._enabled:
            return outputs
        if self._stepper.runs_closure:
            raise RuntimeError(f"The closure called scale() by itself. {CONTRACT}")
        return cast("Outputs", self._loss_scale.scaled(outputs))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place, to clip or inspect them.

        Waits for the device, unless the optimizer is fused: once the gradients are clipped by a norm that is NaN, the
        overflowed parameters can no longer be told apart. `step` then waits no more.

        Raises:
            RuntimeError: If called twice, or after `step`, in one iteration, or before `scale`.
            ValueError: If a gradient is float16, unless that is allowed.
        """
        if self._enabled:
            self._stepper.unscale(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients unless that is done, and step the optimizer if all of them are finite.

        A closure (first in `args`, or `closure`), as L-BFGS needs one, computes the loss in autocast and returns it, unscaled,
        without running backward. At each evaluation the scaler clears the gradients, scales the loss, runs backward, unscales
        and checks; call neither `scale` nor backward outside. If one evaluation is not finite, the whole step is undone and
        counts as skipped. That costs a copy of the parameters and of the optimizer's state.

        Returns:
            The result of `optimizer.step(*args, **kwargs)`; None if the step was skipped.

        Raises:
            RuntimeError: If called twice in one iteration, or before `scale`; if there is no gradient; if a closure scales or
                runs backward by itself.
            ValueError: If a gradient is float16, unless that is allowed.
        """
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        closure, args = split_closure(args, kwargs)
        if closure is not None:
            return self._stepper.step_with_closure(optimizer, closure, *args, **kwargs)
        return self._stepper.step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: shrink the scale after an overflow, grow it after `growth_interval` steps without.

        Args:
            new_scale: Sets the scale instead: a number, or a tensor with one element that requires no gradient.

        Raises:
            ValueError: If `new_scale` is not a number between `min_scale` and `max_scale`, or is a tensor that requires a
                gradient.
            RuntimeError: If no optimizer's gradients were checked in this iteration.
            FloatingPointError: If a gradient overflowed at `min_scale` and `on_min_scale` is "raise".
        """
        if not self._enabled:
            return
        scale, flags = self._loss_scale.needed_by("update"), self._stepper.flags()
        if not flags and new_scale is None:
            raise RuntimeError("No inf checks were recorded prior to update: call scaler.step(optimizer) first")
        outcomes, used, exhausted = self._outcomes.of_this_iteration(), self._loss_scale.snapshot(), None
        found = total(flags, scale.device) if flags else None
        if new_scale is not None:
            self._loss_scale.set(number_of(new_scale, "new_scale"), "new_scale")
        elif found is not None:
            exhausted = self._exhaustion.message(self._loss_scale, outcomes)
            self._loss_scale.adapt(found, overflowed=self._outcomes.overflow_is_known())
        self._history.add(used, outcomes, found)
        self._stepper.end_iteration()
        if exhausted is not None:
            self._exhaustion.act(exhausted)

    @property
    def step_was_skipped(self) -> bool:
        """Whether any optimizer's step was skipped in this iteration; after `update`, in the last one."""
        return self._outcomes.skipped()

    def skipped(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's step was skipped; see `step_was_skipped`."""
        outcome = self._outcomes.of(optimizer)
        return outcome is not None and outcome.skipped()

    def overflowed_parameters(self, model: nn.Module | None = None) -> list[str]:
        """Return the names of the parameters that caused the last skipped step; empty if no step was skipped.

        With a fused optimizer on an accelerator the gradients are checked now: ask before they are clipped or cleared.

        Args:
            model: Supplies the names; else the optimizer's own names or the places in its groups are used.
        """
        return self._outcomes.names(model)

    @property
    def should_stop(self) -> bool:
        """Whether a gradient has overflowed at `min_scale`, where `on_min_scale` is "stop"."""
        return self._exhaustion.should_stop

    @property
    def history(self) -> list[ScaleRecord]:
        """Scale and skipped steps of the last `history_size` iterations, oldest first. Waits for the device."""
        return self._history.records()

    def is_enabled(self) -> bool:
        """Return whether this scaler does anything."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the current scale, 1.0 if disabled. Waits for the device."""
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
        """The number of overflows that shrink the scale; see `GradScaler`."""
        return self._loss_scale.hysteresis.times

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._loss_scale.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows.

        Raises:
            ValueError: If it is not a finite number above 1.
        """
        self._loss_scale.growth_factor = checked_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor of the scale after an overflow."""
        return self._loss_scale.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of the scale after an overflow.

        Raises:
            ValueError: If it is not between 0 and 1.
        """
        self._loss_scale.backoff_factor = checked_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of steps in a row without an overflow after which the scale grows."""
        return self._loss_scale.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of steps in a row without an overflow after which the scale grows.

        Counted steps still count: if there are enough of them, the scale grows after the next.

        Raises:
            ValueError: If it is not an integer of at least 1.
        """
        self._loss_scale.set_growth_interval(new_interval, self._loss_scale.get_growth_tracker())

    def state_dict(self) -> dict[str, Any]:
        """Return the state under torch's keys, to be taken after `update`; empty if disabled.

        With a hysteresis above 1 it has two more keys, which torch ignores. The history is not part of it.
        """
        return self._loss_scale.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or torch's has saved; does nothing if disabled.

        A state of torch's keeps the hysteresis as it is set, with none of its overflows used up.

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

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._stepper.states:
            raise RuntimeError("A GradScaler may only be pickled at the beginning of an iteration, or after scaler.update().")
        return self.__dict__

    # Private names of torch's GradScaler that training frameworks use.

    @property
    def _per_optimizer_states(self) -> dict[int, dict[str, Any]]:
        return self._stepper.states

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self._stepper.check(optimizer, inv_scale, found_inf, allow_fp16=allow_fp16)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        scale = self._loss_scale.needed_by("_check_inf_per_device")
        found = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale), allow_fp16=True)
        self._stepper.states[id(optimizer)][FOUND] = found
        return found

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = self._stepper.states[id(optimizer)][FOUND]
        return found

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
