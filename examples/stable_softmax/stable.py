"""Softmax, log-softmax and cross-entropy that are finite and right wherever the exact result is.

With m the largest allowed logit of a row, softmax(x) = softmax(x - m): every power is then at most 1, and their sum at least 1,
because the largest power is exactly 1. Nothing overflows, and the logarithm is taken of a number of 1 or more (the log-sum-exp
trick; Blanchard, Higham and Higham, "Accurately computing the log-sum-exp and softmax functions", 2021).

A row without any allowed entry has the sum 0 instead. It gives probabilities of 0, logarithms of minus infinity, no loss and no
gradient, never NaN. A logit that is itself NaN or plus infinity gives NaN: it comes from an overflow before, which a gradient
scaler has to see. A logit of minus infinity is a masked one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_logits(logits: Tensor, mask: Tensor | None) -> None:
    """Raise TypeError or ValueError unless the logits are floating point and the mask fits them."""
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if mask is None:
        return
    if mask.dtype is not torch.bool:
        raise TypeError(f"mask must be bool, True where an entry is allowed, got {mask.dtype}")
    if not _broadcasts(mask, logits):
        raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit logits of shape {tuple(logits.shape)}")


def check_targets(logits: Tensor, targets: Tensor, label_smoothing: float) -> None:
    """Raise TypeError or ValueError unless there is one class number per row, and the smoothing is a share."""
    if logits.ndim != 2:
        raise ValueError(f"logits must have the shape (n, classes), got {tuple(logits.shape)}")
    if targets.dtype is not torch.int64:
        raise TypeError(f"targets must be int64 class numbers, got {targets.dtype}")
    n, classes = logits.shape
    if targets.shape != (n,):
        raise ValueError(f"targets must have the shape ({n},), one for each row of the logits, got {tuple(targets.shape)}")
    if n and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise ValueError(f"targets must be between 0 and {classes - 1}, got {int(targets.min())} to {int(targets.max())}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")


def _broadcasts(mask: Tensor, logits: Tensor) -> bool:
    try:
        return mask.expand_as(logits).shape == logits.shape
    except RuntimeError:
        return False


def softmax(logits: Tensor, dim: int = -1, *, mask: Tensor | None = None, compute: torch.dtype | None = None) -> Tensor:
    """Return the probabilities of the entries along a dimension.

    Args:
        logits: Floating point, any shape.
        dim: The dimension that adds up to 1.
        mask: bool, broadcast to the logits' shape; False takes an entry out.
        compute: The dtype of the differences, powers and sums; by default float32, float64 for float64 logits. float16 is
            stable too, but less exact: rounding x - m to float16 costs a probability of e^-17 up to 2^-7 of its size, and the
            sum overflows over more than 65504 equal logits.

    Returns:
        Probabilities of the logits' shape and dtype.

    Raises:
        TypeError: If the logits are not floating point, or the mask is not bool.
        ValueError: If the mask does not fit the logits.
    """
    powers = _below_largest(logits, dim, mask, compute).exp()
    return (powers / _at_least_one(powers.sum(dim, keepdim=True))).to(logits.dtype)


def log_softmax(logits: Tensor, dim: int = -1, *, mask: Tensor | None = None, compute: torch.dtype | None = None) -> Tensor:
    """Return the logarithms of the probabilities along a dimension; arguments and errors as for `softmax`.

    Returns:
        Of the logits' shape and dtype; minus infinity where masked, or where float16 has no such number (two float16 logits
        may be 131008 apart).
    """
    return _log_softmax(logits, dim, mask, compute).to(logits.dtype)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    mask: Tensor | None = None,
    compute: torch.dtype | None = None,
) -> Tensor:
    """Return the mean over the rows of -log p[target], as `torch.nn.functional.cross_entropy` defines it, with masked classes.

    With label smoothing e, a row's loss is (1 - e) * -log p[target] + e * the mean of -log p over its allowed classes (Szegedy
    et al., "Rethinking the Inception architecture for computer vision", 2015).

    Args:
        logits: Floating point, shape (n, classes).
        targets: int64 class numbers, shape (n,).
        label_smoothing: Between 0 and 1.
        mask: bool, broadcast to the logits' shape; False takes a class out. A row without any allowed class does not count.
        compute: As for `softmax`.

    Returns:
        A scalar in the dtype of `compute`: 0 if no row counts, infinite if a row's target is masked and other classes are not.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If shapes do not fit, a target is no class, or `label_smoothing` is not between 0 and 1.
    """
    check_targets(logits, targets, label_smoothing)
    surprise = -_log_softmax(logits, 1, mask, compute)
    allowed = (logits != -math.inf) if mask is None else (logits != -math.inf) & mask
    counts = allowed.any(1)
    of_target = surprise.gather(1, targets[:, None])[:, 0]
    losses = of_target
    if label_smoothing > 0:
        # torch.where, not a product with 0: 0 times infinity is NaN, in the gradient too.
        of_all = torch.where(allowed, surprise, 0.0).sum(1) / allowed.sum(1).clamp_min(1)
        losses = of_all if label_smoothing == 1 else (1 - label_smoothing) * of_target + label_smoothing * of_all
    return torch.where(counts, losses, 0.0).sum() / counts.sum().clamp_min(1)


def _log_softmax(logits: Tensor, dim: int, mask: Tensor | None, compute: torch.dtype | None) -> Tensor:
    below = _below_largest(logits, dim, mask, compute)
    return below - _at_least_one(below.exp().sum(dim, keepdim=True)).log()


def _below_largest(logits: Tensor, dim: int, mask: Tensor | None, compute: torch.dtype | None) -> Tensor:
    check_logits(logits, mask)
    allowed = logits.to(compute or torch.promote_types(logits.dtype, torch.float32))
    if mask is not None:
        allowed = allowed.masked_fill(~mask, -math.inf)
    # No gradient through the largest: it cancels. A fully masked row has no largest logit; 0 replaces it.
    largest = allowed.detach().amax(dim, keepdim=True)
    return allowed - largest.masked_fill(largest == -math.inf, 0.0)


def _at_least_one(sum_of_powers: Tensor) -> Tensor:
    return sum_of_powers.clamp_min(1.0)
