"""What the functions of this example take; each check raises with one line."""

from __future__ import annotations

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
