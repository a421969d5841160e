"""How far predicted digits are from the right ones, padding left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from examples.transformer.data import NO_TARGET


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all places that have a digit.

    Args:
        logits: Shape (n, length, 10).
        targets: int64, shape (n, length); -100 does not count.
    """
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)


def accuracy(model: nn.Module, pairs: Dataset[Any]) -> float:
    """The share of places with a digit whose largest logit is that digit's.

    Args:
        model: From tokens to logits, on the CPU; called in the mode and dtype that it is in.
        pairs: Of tokens and targets, as `data` makes them.
    """
    right, places = 0, 0
    with torch.no_grad():
        for tokens, targets in DataLoader(pairs, batch_size=256):
            right += int((model(tokens).argmax(-1) == targets).sum())  # padding is never right: its target is no digit
            places += int((targets != NO_TARGET).sum())
    return right / places
