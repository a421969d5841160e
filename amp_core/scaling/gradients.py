"""An optimizer's gradients: collected, checked for infinities and NaNs, and unscaled in place."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Buckets = dict[tuple[torch.device, torch.dtype], list["Tensor"]]


def bucket_gradients(optimizer: Optimizer, *, allow_fp16: bool) -> Buckets:
    """Collect the dense storage of every gradient of an optimizer by device and dtype.

    Sparse gradients are coalesced first: duplicates that are finite one by one may overflow when they are added up.

    Raises:
        ValueError: If there is a float16 gradient and `allow_fp16` is False.
    """
    # One pass per question, each a comprehension: with hundreds of gradients a loop over all questions takes twice as long.
    gradients = [grad for group in optimizer.param_groups for p in group["params"] if (grad := p.grad) is not None]
    dtypes = {grad.dtype for grad in gradients}
    if torch.float16 in dtypes and not allow_fp16:
        raise ValueError(
            "Attempting to unscale FP16 gradients. Keep the parameters in float32 and let autocast cast them: "
            "a model that was halved with .half() trains badly by scaling its loss; "
            "GradScaler(..., allow_fp16_gradients=True) does it all the same"
        )
    if True in {grad.is_sparse for grad in gradients}:
        gradients = _coalesced(optimizer)
    if any(dtype.is_complex for dtype in dtypes):
        gradients = [dense(grad) for grad in gradients]
        dtypes = {grad.dtype for grad in gradients}
    devices = {grad.device for grad in gradients}
    if len(devices) == len(dtypes) == 1:
        return {(devices.pop(), dtypes.pop()): gradients}
    buckets: Buckets = defaultdict(list)
    for grad in gradients:
        buckets[grad.device, grad.dtype].append(grad)
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
            flag = found.get(device)
            if flag is None:
                flag = found[device] = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse_scale.to(device))
            if recheck:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, torch.ones_like(flag))
    return found


def dense(gradient: Tensor) -> Tensor:
    """The real numbers that a gradient, dense or coalesced, holds: a view."""
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001  (values() would make a copy out of reach)
    return torch.view_as_real(values) if values.is_complex() else values


def _coalesced(optimizer: Optimizer) -> list[Tensor]:
    values = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse and not parameter.grad.is_coalesced():
                parameter.grad = parameter.grad.coalesce()
            values.append(dense(parameter.grad))
    return values
