"""`GradScaler`: keeps small float16 gradients from vanishing, and non-finite ones out of the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from amp_core.scaling import scale_settings as checks
from amp_core.scaling.closure_step import CONTRACT, split_closure
from amp_core.scaling.exhaustion import Exhaustion
from amp_core.scaling.history import History, ScaleRecord
from amp_core.scaling.loss_scale import LossScale
from amp_core.scaling.optimizer_state import FOUND, total
from amp_core.scaling.scale_interface import ScaleInterface, device_type
from amp_core.scaling.step_outcomes import StepOutcomes
from amp_core.scaling.stepper import Stepper

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Outputs = TypeVar("Outputs", bound="Tensor | Iterable[Any]")


class GradScaler(ScaleInterface):
    """Scales the loss up before backward, and unscales, checks and skips before the optimizer's step.

    Drop-in for `torch.amp.GradScaler`: the same methods, the same numbers step for step, exchangeable `state_dict`s. It differs
    where torch goes wrong: the scale keeps within [min_scale, max_scale]; a gradient that becomes non-finite by unscaling is
    found too; a closure is evaluated on scaled losses or refused; settings are checked; `update` takes any number; and it
    answers whether a step was skipped and which parameters overflowed.

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
        hysteresis: The scale shrinks at the overflow with this number, and at every further one, counted until the scale grows
            again, that is, until `growth_interval` steps in a row had none; steps without an overflow in between do not start
            the count again (Megatron-LM's rule). The earlier overflows still skip the step, and start `growth_interval` again.
            1 shrinks at every overflow, as torch does.
        on_min_scale: What `update` does after an overflow at `min_scale`, when no scale can help: "warn", once until the scale
            has grown again; "raise" FloatingPointError, with the iteration ended and the step skipped; or "stop", which sets
            `should_stop`. All name the parameters.
        history_size: How many iterations `history` keeps.
        allow_fp16_gradients: Unscale float16 gradients, too, as those of a model halved with .half(). They are unscaled in
            place, where small ones vanish. The parameters are then guarded as by `guard_parameters`.
        guard_parameters: Undo a step that makes a parameter non-finite out of finite gradients, as too high a learning rate
            does; warns of it, and counts it as skipped, but leaves the scale, which is not to blame. Costs a copy of the
            parameters and of the optimizer's state at each step, and waits for the device.
        reduce_found_inf: Called after each check with a float32 scalar per device, 1.0 if a gradient on it is not finite, else
            0.0, to change in place: `lambda found: torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)` makes
            all ranks skip together, where each has only a shard of the gradients. It is called for an optimizer without any
            gradient, too, so that no rank waits for another in vain. It is called once more after a guarded step and
            one with a closure, with 1.0 if that is to be undone.

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
        min_scale: float = checks.DEFAULT_MIN_SCALE,
        max_scale: float = checks.LARGEST_SCALE,
        hysteresis: int = 1,
        on_min_scale: checks.OnMinScale = "warn",
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
        super().__init__(loss_scale, enabled=enabled)
        self._exhaustion = Exhaustion(checks.checked_on_min_scale(on_min_scale))
        self._history = History(checks.checked_count(history_size, 0, "history_size"))
        self._outcomes = StepOutcomes()
        self._stepper = Stepper(
            loss_scale,
            self._outcomes,
            allow_fp16=allow_fp16_gradients,
            guards=guard_parameters,
            reduce_found_inf=checks.checked_hook(reduce_found_inf, "reduce_found_inf"),
        )

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a tensor, or every tensor in a nested iterable, with the scale.

        Returns:
            The same structure; lists and tuples keep their types, other iterables become iterators.

        Raises:
            ValueError: If there is anything but tensors and iterables in it.
            RuntimeError: If called by a closure.
        """
        if not self._enabled:
            return outputs
        if self._stepper.runs_closure:
            raise RuntimeError(f"The closure called scale() by itself. {CONTRACT}")
        return cast("Outputs", self._loss_scale.scaled(outputs))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place, so that they can be clipped or looked at.

        Waits for the device, unless the optimizer is fused: once the gradients are clipped by a norm that is NaN, it is too
        late to tell whose were not finite. `step` then waits no more.

        Raises:
            RuntimeError: If called twice, or after `step`, in one iteration, or before `scale`.
            ValueError: If a gradient is float16, unless that is allowed.
        """
        if self._enabled:
            self._stepper.unscale(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients unless that is done, and step the optimizer if all of them are finite.

        With a closure (first in `args`, or `closure`), as L-BFGS needs one: it computes the loss in autocast and returns it,
        unscaled, without running backward. The scaler clears the gradients, scales the loss, runs backward, unscales and checks
        at each of the optimizer's evaluations; neither `scale` nor backward is called outside. If one evaluation is not finite,
        the whole step is undone and counts as skipped. That costs a copy of the parameters and of the optimizer's state.

        Returns:
            What `optimizer.step(*args, **kwargs)` returns; None if the step was skipped.

        Raises:
            RuntimeError: If called twice in one iteration, or before `scale`; if there is no gradient; if a closure scales
                or runs backward by itself.
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
            new_scale: Sets the scale to this instead: a number, or a tensor with one element that requires no gradient.

        Raises:
            ValueError: If `new_scale` is not a number between `min_scale` and `max_scale`, or is a tensor that requires a
                gradient, which would not flow through the scale.
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
            self._loss_scale.set(checks.number_of(new_scale, "new_scale"), "new_scale")
        elif found is not None:
            exhausted = self._exhaustion.message(self._loss_scale, outcomes)
            self._loss_scale.adapt(found, overflowed=self._outcomes.overflow_is_known())
        self._history.add(used, outcomes, found)
        self._stepper.end_iteration()
        if exhausted is not None:
            self._exhaustion.act(exhausted)

    @property
    def step_was_skipped(self) -> bool:
        """Whether any optimizer's step was skipped in this iteration, or in the last one until the next begins."""
        return self._outcomes.skipped()

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether the step of one of several optimizers was skipped; see `step_was_skipped`."""
        outcome = self._outcomes.of(optimizer)
        return outcome is not None and outcome.skipped()

    def overflowed_parameters(self, model: nn.Module | None = None) -> list[str]:
        """Name the parameters because of which the last step was skipped; empty if none was.

        With a fused optimizer on an accelerator the gradients are looked at now, so ask before they are clipped or cleared.

        Args:
            model: Whose parameters' names to use; else the optimizer's own names or their places in its groups.
        """
        return self._outcomes.names(model)

    @property
    def should_stop(self) -> bool:
        """Whether a gradient has overflowed at `min_scale`, where `on_min_scale` is "stop": no scale can help any more."""
        return self._exhaustion.should_stop

    @property
    def history(self) -> list[ScaleRecord]:
        """The scale, and what was skipped, of the last `history_size` iterations, oldest first. Waits for the device."""
        return self._history.records()

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._stepper.states:
            raise RuntimeError("A GradScaler may only be pickled at the beginning of an iteration, or after scaler.update().")
        return self.__dict__

    # From here on: names of torch's that training frameworks reach for.

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
