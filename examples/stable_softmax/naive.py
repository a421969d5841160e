"""The textbook formulas, computed in the dtype of the logits: what goes wrong in float16."""

from __future__ import annotations

from torch import Tensor


def softmax(logits: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)); in float16 NaN as soon as one logit is above 11.09, or all are below -17.3."""
    powers = logits.exp()
    return powers / powers.sum(dim, keepdim=True)


def log_softmax(logits: Tensor, dim: int = -1) -> Tensor:
    """log(softmax(x)); in float16 minus infinity also where the probability is below 6e-8."""
    return softmax(logits, dim).log()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log p[target]; logits of shape (n, classes), targets int64 of shape (n,)."""
    return -log_softmax(logits).gather(1, targets[:, None]).mean()
