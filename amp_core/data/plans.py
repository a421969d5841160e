"""What is asked of a worker, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from amp_core.data.errors import DataError, one_line
from amp_core.data.own_random import Purpose, generator
from amp_core.data.split import Split


@dataclass(frozen=True)
class Plan:
    """One batch to make.

    Attributes:
        epoch: From 0.
        number: Of the batch in its rank's epoch, from 0.
        items: The items' indices in the data set; of a stream None.
    """

    epoch: int
    number: int
    items: list[int] | None = None


@runtime_checkable
class OrdersItself(Protocol):
    """A data set with a length that knows a better order for training than a random one, such as neighbours near each other."""

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        """The items of one epoch.

        Args:
            generator: The only source of randomness to use; seeded by the run's seed and the epoch.

        Returns:
            As many indices as the set has items, int64 of shape [len(self)].
        """
        ...  # pragma: no cover


def stream_plans(epoch: int, *, skip: int) -> Iterator[Plan]:
    """Plans without end: only the stream knows where it ends."""
    return (Plan(epoch, number) for number in count(skip))


def indexed_plans(dataset: Any, split: Split, *, seed: int, epoch: int, skip: int, shuffle: bool) -> Iterator[Plan]:
    """The plans of one rank's epoch.

    Args:
        dataset: With a length.
        split: Between the ranks.
        seed: Of the run.
        epoch: From 0; the order depends on it and on the seed alone.
        skip: How many batches of the epoch to leave out at its start.
        shuffle: Otherwise the data set's own order.

    Raises:
        DataError: If the data set orders itself and does it wrong.
    """
    order = _order(dataset, generator(Purpose.ORDER, seed, epoch)) if shuffle else torch.arange(len(dataset))
    size = split.round_size
    for number in range(skip, split.batches(len(order))):
        mine = order[number * size + split.rank : (number + 1) * size : split.world_size]
        yield Plan(epoch, number, mine.tolist())


def _order(dataset: Any, source: torch.Generator) -> Tensor:
    items = len(dataset)
    if not isinstance(dataset, OrdersItself):
        return torch.randperm(items, generator=source)
    try:
        order = torch.as_tensor(dataset.epoch_order(source))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"epoch_order of the data set {type(dataset).__name__} raised {one_line(error)}") from error
    if order.shape != (items,) or order.is_floating_point():
        raise DataError(
            f"{type(dataset).__name__}.epoch_order returned {order.dtype} of shape {list(order.shape)}; "
            f"expected {items} whole numbers, one for each item of the set"
        )
    return order
