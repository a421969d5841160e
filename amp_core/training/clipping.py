"""Gradients that are too large, made smaller together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from amp_core.scaling.gradients import dense

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale all gradients so that their norm together is no larger than a limit.

    Args:
        parameters: Whose gradients; those of embeddings may be sparse, which torch's `clip_grad_norm_` does not take.
        largest: The limit; infinity leaves the gradients as they are.

    Returns:
        The norm before, a scalar.
    """
    with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(parameter.grad.is_sparse for parameter in with_gradients):  # type: ignore[union-attr]  # (see the line above)
        return clip_grad_norm_(with_gradients, largest)
    values = [_coalesced(parameter) for parameter in with_gradients]
    norm = get_total_norm(values)
    torch._foreach_mul_(values, torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm


def _coalesced(parameter: Tensor) -> Tensor:
    # Rows that came twice count as their sum, as in a dense gradient.
    gradient = parameter.grad
    assert gradient is not None  # noqa: S101  (for the type checker: only those with gradients are asked)
    if gradient.is_sparse and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return dense(gradient)
