"""How far each optimizer is in the scaler's current iteration, under torch's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

__all__ = [
    "FOUND",
    "OptState",
    "fused_step",
    "must_not_skip_itself",
    "refresh_per_optimizer_state",
    "takes_scale",
    "total",
]

FOUND = "found_inf_per_device"  # by device, a float32 scalar that is not 0 where a gradient is not finite


def refresh_per_optimizer_state() -> dict[str, Any]:
    """The state of an optimizer that this iteration has not touched yet."""
    return {"stage": OptState.READY, FOUND: {}}


def takes_scale(optimizer: Any) -> bool:
    """Whether an optimizer unscales and skips in its own fused kernel, without the host's waiting for the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not _wants_scaler(type(optimizer).step)


@cache
def _wants_scaler(step: Callable[..., Any]) -> bool:
    # An older contract, which torch warns of: such an optimizer steps like any other if it is not given the scaler.
    return "grad_scaler" in inspect.signature(step).parameters


def must_not_skip_itself(optimizer: Any) -> bool:
    """Whether a fused optimizer would be left with garbage if it skipped this step.

    SGD allocates its momentum without writing to it and takes it for written at the next step, even if the kernel skipped this
    one (`torch.optim.sgd._fused_sgd`).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    groups = [group for group in optimizer.param_groups if group["momentum"] != 0]
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    return any(optimizer.state[p].get("momentum_buffer") is None if p in optimizer.state else True for p in parameters)


def total(found: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of scalars from several devices, on one; at least one scalar."""
    first, *others = [flag.to(device, non_blocking=True) for flag in found]
    return torch.stack([first, *others]).sum() if others else first


def fused_step(optimizer: Any, state: dict[str, Any], scale: torch.Tensor, *args: Any, **kwargs: Any) -> float | None:
    """Step such an optimizer, handing it the scale (unless its gradients are unscaled already) and what was found.

    Args:
        optimizer: One that `takes_scale`.
        state: Its state; its gradients have been checked.
        scale: A float32 scalar.
        *args: For `optimizer.step`, as are the keyword arguments.
        **kwargs: See `args`.
    """
    given = getattr(optimizer, "grad_scale", None)
    unscaled = state["stage"] is OptState.UNSCALED
    optimizer.grad_scale = given if unscaled else scale * (1 if given is None else given)
    optimizer.found_inf = total(state[FOUND].values(), scale.device)
    try:
        result: float | None = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    return result
