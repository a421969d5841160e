"""The scaler's view of an optimizer: parameter names, gradients, stage in the iteration, fused step."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

Buckets = dict[tuple[torch.device, torch.dtype], list["Tensor"]]


class Gradients(NamedTuple):
    """The gradients of one optimizer."""

    buckets: Buckets  # the dense storage of each, by device and dtype
    repeated: list[Tensor]  # the storage of those sparse ones whose indices may occur more than once


def bucket_gradients(optimizer: Optimizer, *, allow_fp16: bool) -> Gradients:
    """Collect the gradients of an optimizer by device and dtype.

    Sparse float16 gradients are coalesced first, as torch does, because scaled duplicates easily overflow when summed. Other
    sparse gradients stay uncoalesced: the optimizer sums their unscaled values, as in torch.

    Raises:
        ValueError: If there is a float16 gradient and `allow_fp16` is False.
    """
    # One comprehension per question: with hundreds of gradients a loop over all questions takes twice as long.
    gradients = [grad for group in optimizer.param_groups for p in group["params"] if (grad := p.grad) is not None]
    dtypes = {grad.dtype for grad in gradients}
    if torch.float16 in dtypes and not allow_fp16:
        raise ValueError(
            "Attempting to unscale FP16 gradients. Keep the parameters in float32 and let autocast cast them: "
            "a model that was halved with .half() trains badly by scaling its loss; "
            "GradScaler(..., allow_fp16_gradients=True) does it all the same"
        )
    repeated: list[Tensor] = []
    if True in {grad.is_sparse for grad in gradients}:
        gradients, repeated = _stored(optimizer)
    if any(dtype.is_complex for dtype in dtypes):
        gradients = [dense(grad) for grad in gradients]
        dtypes = {grad.dtype for grad in gradients}
    devices = {grad.device for grad in gradients}
    if len(devices) == len(dtypes) == 1:
        return Gradients({(devices.pop(), dtypes.pop()): gradients}, repeated)
    buckets: Buckets = defaultdict(list)
    for grad in gradients:
        buckets[grad.device, grad.dtype].append(grad)
    return Gradients(buckets, repeated)


def check_and_unscale_(
    gradients: Gradients, inverse_scale: Tensor, found_inf: Tensor, *, recheck: bool
) -> dict[torch.device, Tensor]:
    """Multiply the gradients of `bucket_gradients` in place by a float32 scalar, and flag non-finite ones.

    `found_inf` is a float32 scalar 0.0, copied for each device. `recheck` checks again after multiplying: a factor above 1 may
    make a finite gradient overflow.

    Returns:
        A float32 scalar by device: 1.0 if a gradient is infinite or NaN, or if the magnitudes of a gradient with repeated
        indices sum to infinity (its duplicates might, too).
    """
    found: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (device, _), bucket in gradients.buckets.items():
            flag = found.get(device)
            if flag is None:
                flag = found[device] = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(bucket, flag, inverse_scale.to(device))
            if recheck:
                torch._amp_foreach_non_finite_check_and_unscale_(bucket, flag, torch.ones_like(flag))
        for values in gradients.repeated:
            flag = found[values.device]
            torch._amp_foreach_non_finite_check_and_unscale_([_sum_of_magnitudes(values)], flag, torch.ones_like(flag))
    return found


def is_finite(gradient: Tensor) -> bool:
    """Return whether `check_and_unscale_` counts a gradient as finite. Waits for the device."""
    values = dense(gradient)
    found = _sum_of_magnitudes(values) if _repeats(gradient) else values
    return bool(torch.isfinite(found).all())


def dense(gradient: Tensor) -> Tensor:
    """Return a view of the real numbers that a gradient stores; those of repeated indices stay apart."""
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001  (values() would make a copy out of reach)
    return torch.view_as_real(values) if values.is_complex() else values


def _stored(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """Return the stored values of all gradients, and of those with repeated indices."""
    stored, repeated = [], []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse and parameter.grad.dtype is torch.float16:
                parameter.grad = parameter.grad.coalesce()
            stored.append(dense(parameter.grad))
            if _repeats(parameter.grad):
                repeated.append(stored[-1])
    return stored, repeated


def _repeats(gradient: Tensor) -> bool:
    return gradient.is_sparse and not gradient.is_coalesced()


def _sum_of_magnitudes(values: Tensor) -> Tensor:
    """Return an upper bound of the sum of duplicates; half the time of summing them, and no wait for the device."""
    total: Tensor = torch.linalg.vector_norm(values, 1, dtype=torch.promote_types(values.dtype, torch.float32))
    return total


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def with_non_finite_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters whose gradients contain an infinity or a NaN. Waits for the device."""
    return [p for p in parameters_of(optimizer) if p.grad is not None and not is_finite(p.grad)]


def names_of(parameters: Iterable[Tensor], optimizer: Optimizer, model: nn.Module | None = None) -> list[str]:
    """Return the model's names for parameters if given, else the optimizer's own, else their places in the parameter groups."""
    names = {id(parameter): name for parameter, name in _names_in(optimizer)}
    if model is not None:
        names |= {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "a parameter that the optimizer no longer has") for parameter in parameters]


def listed(names: list[str], most: int = 3) -> str:
    """Return the first few names, and the number of the others, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _names_in(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    for index, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        # An optimizer made of named_parameters() keeps the names beside the parameters. Code that removes parameters, to freeze
        # them, may leave the names, which then match no longer.
        names = group.get("param_names") or []
        if len(names) != len(parameters):
            names = [f"group {index}, parameter {place}" for place in range(len(parameters))]
        yield from zip(parameters, names, strict=True)


__all__ = [
    "FOUND",
    "OptState",
    "fused_step",
    "must_not_skip_itself",
    "refresh_per_optimizer_state",
    "takes_scale",
    "total",
]

FOUND = "found_inf_per_device"  # key of the flags by device: a float32 scalar that is not 0 if a gradient is not finite


def refresh_per_optimizer_state() -> dict[str, Any]:
    """Return the state of an optimizer that was not touched in this iteration, under torch's name and keys."""
    return {"stage": OptState.READY, FOUND: {}}


def takes_scale(optimizer: Any) -> bool:
    """Return whether an optimizer unscales and skips in its own fused kernel, without a wait for the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not _wants_scaler(type(optimizer).step)


@cache
def _wants_scaler(step: Callable[..., Any]) -> bool:
    # An older, deprecated contract: such an optimizer steps like any other if it does not receive the scaler.
    return "grad_scaler" in inspect.signature(step).parameters


def must_not_skip_itself(optimizer: Any) -> bool:
    """Return whether a fused optimizer would keep uninitialized memory if it skipped this step.

    SGD allocates its momentum without writing it and reads it at the next step, even if the kernel skipped this step
    (`torch.optim.sgd._fused_sgd`).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    groups = [group for group in optimizer.param_groups if group["momentum"] != 0]
    parameters = [p for group in groups for p in group["params"] if p.grad is not None]
    return any(optimizer.state[p].get("momentum_buffer") is None if p in optimizer.state else True for p in parameters)


def total(found: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of at least one scalar from several devices, on one device."""
    first, *others = [flag.to(device, non_blocking=True) for flag in found]
    return torch.stack([first, *others]).sum() if others else first


def fused_step(optimizer: Any, state: dict[str, Any], scale: torch.Tensor, *args: Any, **kwargs: Any) -> float | None:
    """Step an optimizer that `takes_scale`, with the flags found and, unless its gradients are unscaled, the scale."""
    given = getattr(optimizer, "grad_scale", None)
    unscaled = state["stage"] is OptState.UNSCALED
    optimizer.grad_scale = given if unscaled else scale * (1 if given is None else given)
    optimizer.found_inf = total(state[FOUND].values(), scale.device)
    try:
        result: float | None = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    return result
