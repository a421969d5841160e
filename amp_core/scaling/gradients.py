"""An optimizer's gradients: checked for infinities and NaNs, unscaled, and named where they overflowed."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer

Buckets = dict[tuple[torch.device, torch.dtype], list["Tensor"]]


def bucket_gradients(optimizer: Optimizer, *, allow_fp16: bool) -> Buckets:
    """Collect the dense storage of every gradient of an optimizer by device and dtype.

    Sparse gradients are coalesced first: duplicates that are finite one by one may overflow when they are added up.

    Raises:
        ValueError: If there is a float16 gradient and `allow_fp16` is False.
    """
    buckets: Buckets = defaultdict(list)
    for parameter in parameters_of(optimizer):
        if parameter.grad is None:
            continue
        if parameter.grad.dtype is torch.float16 and not allow_fp16:
            raise ValueError(
                "Attempting to unscale FP16 gradients. Keep the parameters in float32 and let autocast cast them: "
                "a model that was halved with .half() cannot be trained by scaling its loss"
            )
        if parameter.grad.is_sparse and not parameter.grad.is_coalesced():
            parameter.grad = parameter.grad.coalesce()
        values = _dense(parameter.grad)
        buckets[values.device, values.dtype].append(values)
    return buckets


def check_and_unscale_(
    buckets: Buckets, inverse_scale: Tensor, found_inf: Tensor, *, recheck: bool
) -> dict[torch.device, Tensor]:
    """Multiply gradients in place, and note whether any is not finite.

    Args:
        buckets: What `bucket_gradients` returned.
        inverse_scale: The factor, a float32 scalar.
        found_inf: A float32 scalar 0.0, which a copy of is made for each device.
        recheck: Look again after multiplying, because the factor may be above 1 and make a finite gradient overflow.

    Returns:
        By device, a float32 scalar: 1.0 where a gradient is infinite or NaN.
    """
    found: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (device, _), gradients in buckets.items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse_scale.to(device))
            if recheck:
                one = torch.ones_like(flag)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, one)
    return found


def non_finite_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters whose gradients hold an infinity or a NaN."""
    return [p for p in parameters_of(optimizer) if p.grad is not None and not torch.isfinite(_dense(p.grad)).all()]


def parameter_names(parameters: Iterable[Tensor], optimizer: Optimizer, model: nn.Module | None) -> list[str]:
    """Names for parameters: the model's if given, else the optimizer's own, else their places in the parameter groups."""
    names = {id(parameter): name for parameter, name in _names_in(optimizer)}
    if model is not None:
        names |= {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every parameter of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _names_in(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    for index, group in enumerate(optimizer.param_groups):
        # An optimizer that was given named_parameters() keeps the names beside the parameters.
        names = group.get("param_names") or [f"group {index}, parameter {place}" for place in range(len(group["params"]))]
        yield from zip(group["params"], names, strict=True)


def _dense(gradient: Tensor) -> Tensor:
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001  (values() would make a copy out of reach)
    return torch.view_as_real(values) if values.is_complex() else values
