"""How the learning rate moves over a run."""

from __future__ import annotations

import math


def warmup_and_cosine(step: int, total: int) -> float:
    """The share of the highest learning rate at a step: rising over the first twentieth, then half a cosine down to 0.

    Args:
        step: From 0.
        total: Of all steps. Source of the shape: Loshchilov and Hutter, "SGDR", 2017, with a linear warm-up before it.
    """
    warmup = max(1, total // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
