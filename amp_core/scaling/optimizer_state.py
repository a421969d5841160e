"""How far each optimizer is in the scaler's current iteration, under torch's names."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

FOUND = "found_inf_per_device"  # by device, a float32 scalar that is not 0 where a gradient is not finite


class OptState(Enum):
    """The stages of an iteration."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


def refresh_per_optimizer_state() -> dict[str, Any]:
    """The state of an optimizer that this iteration has not touched yet."""
    return {"stage": OptState.READY, FOUND: {}}


def takes_scale(optimizer: Any) -> bool:
    """Whether an optimizer unscales and skips in its own fused kernel, without the host's waiting for the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


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
    optimizer.found_inf = torch.stack([found.to(scale.device) for found in state[FOUND].values()]).sum()
    try:
        result: float | None = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    return result
