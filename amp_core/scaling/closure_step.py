"""A step of an optimizer that evaluates the loss by itself, such as L-BFGS."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from amp_core.scaling.parameter_names import parameters_of
from amp_core.scaling.step_snapshot import step_or_undo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

CONTRACT = (
    "With an enabled GradScaler a closure computes the loss in autocast and returns it, unscaled and with its graph; "
    "the scaler scales it, runs backward and unscales the gradients at each evaluation"
)


def split_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[[], Any] | None, tuple[Any, ...]]:
    """Take the closure out of the arguments of an optimizer's step; removes it from `kwargs`.

    Returns:
        The closure if there is one, and the positional arguments that are left.

    Raises:
        RuntimeError: If something that can be called is passed elsewhere than first or as `closure`.
    """
    closure = kwargs.pop("closure", None)
    if closure is None and args and (args[0] is None or callable(args[0])):
        closure, args = args[0], args[1:]
    if any(callable(value) for value in args):
        raise RuntimeError("A closure must be the first argument after the optimizer, or be passed as closure=...")
    return closure, args


class _OverflowError(Exception):
    """Leaves the optimizer's step when an evaluation is not finite."""


def step_with_closure(
    optimizer: Optimizer,
    closure: Callable[[], Any],
    backward: Callable[[Tensor], bool],
    agree: Callable[[bool], bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[bool, float | None, bool, list[Tensor]]:
    """Step as a whole or not at all.

    Args:
        optimizer: Steps by calling a closure, as often as it likes.
        closure: Returns the loss.
        backward: Scales a loss, runs backward, unscales the gradients; returns whether any is not finite.
        agree: See `step_or_undo`.
        *args: For `optimizer.step`, as are the keyword arguments.
        **kwargs: See `args`.

    Returns:
        Whether all evaluations were finite; what the optimizer's step returns; whether it was undone because it made parameters
        non-finite all the same, and which. Unless the first is True and the third False, the parameters and the optimizer are
        as before.

    Raises:
        RuntimeError: If the closure runs backward itself, or returns no loss. Nothing has changed but the gradients.
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
