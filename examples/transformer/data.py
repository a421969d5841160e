"""Padded sequences of random digits, their sorted targets, and the loss and accuracy that leave padding out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

LENGTH = 8
SHORTEST = 3
PADDING = 0
NO_TARGET = -100  # what torch's cross-entropy leaves out by default
TRAINING, HELD_OUT = 2048, 512


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the held-out set, always the same ones.

    Returns:
        Two data sets of pairs (tokens, targets), int64 of shape (8,): a digit plus 1, or 0 for padding; and the digits in
        ascending order, or -100 for padding.
    """
    return _sequences(TRAINING, seed=0), _sequences(HELD_OUT, seed=1)


def _sequences(count: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (count, LENGTH), generator=random)
    lengths = torch.randint(SHORTEST, LENGTH + 1, (count, 1), generator=random)
    present = torch.arange(LENGTH) < lengths
    return TensorDataset(torch.where(present, digits + 1, PADDING), ascending(digits, present))


def ascending(digits: Tensor, present: Tensor) -> Tensor:
    """Sort each row's digits that are present; -100 where none is left; both of shape (n, length)."""
    last = 10  # padding sorts behind every digit
    in_order = torch.where(present, digits, last).sort(1).values
    return torch.where(in_order == last, NO_TARGET, in_order)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all places that have a digit.

    Args:
        logits: Shape (n, length, 10).
        targets: int64, shape (n, length); -100 does not count.
    """
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)


def accuracy(model: nn.Module, pairs: Dataset[Any]) -> float:
    """Return the share of places with a digit whose largest logit is that digit's.

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
