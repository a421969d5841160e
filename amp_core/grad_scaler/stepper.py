"""Check, unscale and step: the stages of an optimizer between two updates of the scale."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfserve.amp_core.grad_scaler.loss_scale import LossScale
from halfserve.amp_core.grad_scaler.optimizers import (
    FOUND,
    OptState,
    bucket_gradients,
    check_and_unscale_,
    fused_step,
    listed,
    must_not_skip_itself,
    names_of,
    parameters_of,
    refresh_per_optimizer_state,
    takes_scale,
)
from halfserve.amp_core.grad_scaler.outcomes import StepOutcome, StepOutcomes


class StepSnapshot:
    """Copies of an optimizer's parameters, state and settings, to undo a step.

    Takes the memory of the parameters and of the optimizer's state once more.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters_of(optimizer)]
        self._state: list[tuple[Any, Any]] = list(
            zip(optimizer.state, copy.deepcopy(list(optimizer.state.values())), strict=True)
        )
        self._groups = [_settings(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, before in self._parameters:
                parameter.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings)

    def became_non_finite(self) -> list[Tensor]:
        """Return the parameters that now contain infinities or NaNs and did not before. Waits for the device."""
        broken = [(parameter, before) for parameter, before in self._parameters if not _is_finite(parameter)]
        return [parameter for parameter, before in broken if _is_finite(before)]


def step_or_undo(
    optimizer: Optimizer, step: Callable[[], Any], agree: Callable[[bool], bool]
) -> tuple[float | None, bool, list[Tensor]]:
    """Step, but undo the step if it made a parameter non-finite, or failed.

    `agree` combines the processes' answers: True if a parameter of any process became non-finite.

    Returns:
        The result of `step`, False and no parameters; or None, True, and the parameters of this process that became non-finite.
    """
    before = StepSnapshot(optimizer)
    try:
        result = step()
    except BaseException:
        before.restore()
        raise
    broken = before.became_non_finite()
    if not agree(bool(broken)):
        return cast("float | None", result), False, []
    before.restore()
    return None, True, broken


def warn_of_undone_step(optimizer: Optimizer, broken: list[Tensor]) -> None:
    names = listed(names_of(broken, optimizer)) or "parameters of another process"
    warnings.warn(
        f"The step of {type(optimizer).__name__} made {names} non-finite out of finite gradients, "
        "so it was undone. Lower the learning rate or clip the gradients; with float16 parameters, raise the optimizer's eps "
        "(below 6e-8 it is 0 in float16) or keep the parameters in float32",
        RuntimeWarning,
        stacklevel=5,
    )


def _is_finite(tensor: Tensor) -> bool:
    finite = torch.isfinite(tensor).all()
    # For a sharded parameter (torch's fully_shard) this is the result of the process's own shard.
    whole = getattr(finite, "full_tensor", None)
    return bool(finite if whole is None else whole())


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key not in {"params", "param_names"}})


CONTRACT = (
    "With an enabled GradScaler a closure computes the loss in autocast and returns it, unscaled and with its graph; "
    "the scaler scales it, runs backward and unscales the gradients at each evaluation"
)


def split_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[[], Any] | None, tuple[Any, ...]]:
    """Take the closure out of an optimizer step's arguments and of `kwargs`; returns it or None, and the other arguments.

    Raises:
        RuntimeError: If a callable is passed elsewhere than first or as `closure`.
    """
    closure = kwargs.pop("closure", None)
    if closure is None and args and (args[0] is None or callable(args[0])):
        closure, args = args[0], args[1:]
    if any(callable(value) for value in args):
        raise RuntimeError("A closure must be the first argument after the optimizer, or be passed as closure=...")
    return closure, args


class _OverflowError(Exception):
    """Ends the optimizer's step when an evaluation is not finite."""


def step_with_closure(
    optimizer: Optimizer,
    closure: Callable[[], Any],
    backward: Callable[[Tensor], bool],
    agree: Callable[[bool], bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, float | None, bool, list[Tensor]]:
    """Step an optimizer that evaluates the loss itself, such as L-BFGS, as a whole or not at all.

    The optimizer may call the closure any number of times. `backward` scales a loss, runs backward, unscales the gradients and
    returns whether any is not finite; see `step_or_undo` for `agree`.

    Returns:
        Whether all evaluations were finite; the result of the optimizer's step; whether the step was undone because it made
        parameters non-finite, and which. Unless all evaluations were finite and the step was not undone, the parameters and the
        optimizer are unchanged.

    Raises:
        RuntimeError: If the closure runs backward itself, or returns no loss. Only the gradients have changed.
    """

    def evaluate() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = _checked_loss(closure(), optimizer)
        if backward(loss) or not torch.isfinite(loss).all():
            raise _OverflowError
        return loss.detach()

    try:
        result, undone, broken = step_or_undo(optimizer, partial(optimizer.step, evaluate, *args, **kwargs), agree)
    except _OverflowError:
        return False, None, False, []
    return True, result, undone, broken


def _checked_loss(loss: object, optimizer: Optimizer) -> Tensor:
    if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
        raise RuntimeError(f"The closure ran backward by itself, on a loss that is not scaled. {CONTRACT}")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise RuntimeError(f"The closure returned no loss to run backward on, but {_what(loss)}. {CONTRACT}")
    return loss


def _what(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)} {'with' if value.requires_grad else 'without'} a graph"


State = dict[str, Any]


class Stepper:
    """Takes each optimizer through the stages of an iteration; a call that fails leaves the stage unchanged.

    Attributes:
        states: Stage and flags by the id of an optimizer, under torch's keys.
        runs_closure: Whether a step with a closure is in progress.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        outcomes: StepOutcomes,
        *,
        allow_fp16: bool,
        guards: bool,
        reduce_found_inf: Callable[[Tensor], Any] | None,
    ) -> None:
        self._loss_scale, self._outcomes = loss_scale, outcomes
        self._allow_fp16, self._guards = allow_fp16, guards
        self._reduce_found_inf = reduce_found_inf
        self.states: dict[int, State] = defaultdict(refresh_per_optimizer_state)
        self.runs_closure = False

    def flags(self) -> list[Tensor]:
        """Return the flags of this iteration's checks: scalars, not 0 where a gradient is not finite."""
        return [flag for state in self.states.values() for flag in state[FOUND].values()]

    def end_iteration(self) -> None:
        self.states = defaultdict(refresh_per_optimizer_state)
        self._outcomes.end_iteration()

    def check(
        self, optimizer: Optimizer, inverse_scale: Tensor, found_inf: Tensor, *, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients and flag non-finite ones; see `check_and_unscale_`."""
        gradients = bucket_gradients(optimizer, allow_fp16=allow_fp16)
        found = check_and_unscale_(gradients, inverse_scale, found_inf, recheck=self._loss_scale.may_be_below_one())
        if self._reduce_found_inf is not None:
            # Other ranks may have gradients and wait for this one.
            found = found or {found_inf.device: found_inf.clone()}
            for flag in found.values():
                self._reduce_found_inf(flag)
        return found

    def unscale(self, optimizer: Optimizer) -> None:
        """See `GradScaler.unscale_`."""
        scale, state = self._loss_scale.needed_by("unscale_"), self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._unscale(optimizer, scale, state)
        self.states[id(optimizer)] = state

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See `GradScaler.step`."""
        scale, state = self._loss_scale.needed_by("step"), self._steppable_state(optimizer)
        guards = self._guards_parameters(optimizer)
        # A fused optimizer unscales without checking the result, which may overflow if the scale is below 1.
        fused = takes_scale(optimizer) and not guards
        if state["stage"] is OptState.READY:
            if fused and not self._loss_scale.may_be_below_one():
                self._look(optimizer, state, torch.ones_like(scale))
            else:
                self._unscale(optimizer, scale, state)
        if not state[FOUND]:
            raise RuntimeError("No inf checks were recorded for this optimizer: none of its parameters has a gradient")
        outcome = self._outcomes.of_check(optimizer, state)
        self.states[id(optimizer)] = state
        result: float | None = None
        if (fused and self._skips_itself(outcome)) or not outcome.overflowed():
            if fused:
                result = fused_step(optimizer, state, scale, *args, **kwargs)
            elif guards:
                result, undone, broken = step_or_undo(optimizer, partial(optimizer.step, *args, **kwargs), self._agree)
                self._blame(outcome, undone, broken)
            else:
                result = cast("float | None", optimizer.step(*args, **kwargs))
        state["stage"] = OptState.STEPPED
        return result

    def step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> float | None:
        """Step an optimizer that evaluates scaled losses itself; see `GradScaler.step`."""
        state = self._steppable_state(optimizer)
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() is of no use before a step with a closure, which computes the gradients again.")

        def backward(loss: Tensor) -> bool:
            torch.autograd.backward(self._loss_scale.scaled(loss))
            self._unscale(optimizer, self._loss_scale.needed_by("step"), state)
            if not state[FOUND]:
                raise RuntimeError("The closure's loss depends on no parameter of this optimizer")
            return self._outcomes.of_check(optimizer, state).overflowed()

        self.runs_closure = True
        try:
            finite, result, undone, broken = step_with_closure(optimizer, closure, backward, self._agree, *args, **kwargs)
        finally:
            self.runs_closure = False
        if not state[FOUND]:
            raise RuntimeError(f"{type(optimizer).__name__} stepped without calling the closure")
        outcome = self._outcomes.of_check(optimizer, state)
        if not finite and not outcome.overflowed():  # the loss itself was not finite
            outcome.flag_overflow()
        state["stage"] = OptState.STEPPED
        self.states[id(optimizer)] = state
        self._blame(outcome, undone, broken)
        return result

    def _state_of(self, optimizer: Optimizer) -> State:
        return self.states.get(id(optimizer)) or refresh_per_optimizer_state()

    def _steppable_state(self, optimizer: Optimizer) -> State:
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        return state

    def _unscale(self, optimizer: Optimizer, scale: Tensor, state: State) -> None:
        # In double precision, and rounded once: the float32 quotient is not exact for every scale.
        self._look(optimizer, state, scale.double().reciprocal().float())
        state["stage"] = OptState.UNSCALED

    def _look(self, optimizer: Optimizer, state: State, inverse_scale: Tensor) -> None:
        found = self.check(optimizer, inverse_scale, torch.zeros_like(inverse_scale), allow_fp16=self._allow_fp16)
        state[FOUND] = found
        if found:
            costs_nothing = all(device.type == "cpu" for device in found)
            self._outcomes.note(optimizer, state, look_now=costs_nothing or not takes_scale(optimizer))

    def _guards_parameters(self, optimizer: Optimizer) -> bool:
        return self._guards or (self._allow_fp16 and any(p.dtype is torch.float16 for p in parameters_of(optimizer)))

    def _skips_itself(self, outcome: StepOutcome) -> bool:
        """Return whether a fused optimizer decides on the device, because the host does not know the outcome."""
        return outcome.known() is None and not must_not_skip_itself(outcome.optimizer)

    def _agree(self, is_broken: bool) -> bool:
        """Return whether a step is to be undone because of this process or another."""
        if self._reduce_found_inf is None:
            return is_broken
        flag = torch.full_like(self._loss_scale.needed_by("step"), float(is_broken))
        self._reduce_found_inf(flag)
        return bool(flag.item())

    def _blame(self, outcome: StepOutcome, undone: bool, broken: list[Tensor]) -> None:
        if undone:
            outcome.undone, outcome.culprits = True, broken
            warn_of_undone_step(outcome.optimizer, broken)
