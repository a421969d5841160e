"""Optimizer steps that happen as a whole or not at all, with and without a closure."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfserve.amp_core.grad_scaler.optimizers import listed, names_of, parameters_of


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
        """The parameters that now contain infinities or NaNs and did not before. Waits for the device."""
        broken = [(parameter, before) for parameter, before in self._parameters if not _is_finite(parameter)]
        return [parameter for parameter, before in broken if _is_finite(before)]


def step_or_undo(
    optimizer: Optimizer, step: Callable[[], Any], agree: Callable[[bool], bool]
) -> tuple[float | None, bool, list[Tensor]]:
    """Step, but undo the step if it made a parameter non-finite, or failed.

    Args:
        optimizer: The optimizer that `step` steps.
        step: Makes the step.
        agree: Function from whether a parameter of this process became non-finite to whether one of any process did.

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
    """Take the closure out of the arguments of an optimizer's step; removes it from `kwargs`.

    Returns:
        The closure or None, and the remaining positional arguments.

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

    Args:
        optimizer: Calls the closure any number of times in its step.
        closure: Returns the loss.
        backward: Scales a loss, runs backward, unscales the gradients; returns whether any is not finite.
        agree: See `step_or_undo`.
        *args: Arguments of `optimizer.step`.
        **kwargs: Arguments of `optimizer.step`.

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
