"""An optimizer's gradients: collected, checked for infinities and NaNs, and unscaled in place."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Buckets = dict[tuple[torch.device, torch.dtype], list["Tensor"]]


class Gradients(NamedTuple):
    """The gradients of one optimizer.

    Attributes:
        buckets: The dense storage of each, by device and dtype.
        repeated: The storage of those sparse ones whose indices may occur more than once.
    """

    buckets: Buckets
    repeated: list[Tensor]


def bucket_gradients(optimizer: Optimizer, *, allow_fp16: bool) -> Gradients:
    """Collect the gradients of an optimizer by device and dtype.

    Sparse float16 gradients are coalesced first, as torch does: scaled duplicates overflow easily when they are added up.
    Others stay as they are, so that they are added up as torch adds them up: unscaled, by the optimizer.

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
    """Multiply gradients in place, and note whether any is not finite.

    Args:
        gradients: What `bucket_gradients` returned.
        inverse_scale: The factor, a float32 scalar.
        found_inf: A float32 scalar 0.0, which a copy of is made for each device.
        recheck: Look again after multiplying, because the factor may be above 1 and make a finite gradient overflow.

    Returns:
        By device, a float32 scalar: 1.0 where a gradient is infinite or NaN, or where the magnitudes of one with repeated
        indices add up to infinity: so might its duplicates.
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
    """Whether `check_and_unscale_` takes a gradient for finite. Waits for the device."""
    values = dense(gradient)
    found = _sum_of_magnitudes(values) if _repeats(gradient) else values
    return bool(torch.isfinite(found).all())


def dense(gradient: Tensor) -> Tensor:
    """The real numbers that a gradient holds, those of repeated indices one by one: a view."""
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001  (values() would make a copy out of reach)
    return torch.view_as_real(values) if values.is_complex() else values


def _stored(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """What gradients hold: of all, and of those with repeated indices."""
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
    """An upper bound of what duplicates add up to; it takes half the time of adding them up, and waits for nothing."""
    total: Tensor = torch.linalg.vector_norm(values, 1, dtype=torch.promote_types(values.dtype, torch.float32))
    return total
