"""The items of an epoch, split between ranks and cut into batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, distributed

from halfserve.amp_core.data.data_errors import DataError
from halfserve.amp_core.factory import one_line
from halfserve.amp_core.random_state import Purpose, generator


@dataclass(frozen=True, kw_only=True)
class Split:
    """The items of an epoch, dealt in rounds: one rule for data sets with a length and for streams.

    A round is `world_size * batch_size` consecutive items of the epoch's order; rank r takes every `world_size`-th item from
    the r-th on, which is its batch. All rounds but the last are full, so batch k holds the same items for every rank that asks.

    Attributes:
        batch_size: Items per rank in a full batch.
        rank: The number of this process, from 0.
        world_size: The number of ranks.
        training: In training all ranks must have equally many batches. In evaluation each item must come exactly once instead.
        drop_last: Whether to leave out an incomplete last round. None: in training, unless it is the only one, because a batch
            of one item would break BatchNorm; never in evaluation.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1
    training: bool
    drop_last: bool | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise DataError(f"rank must be from 0 to world_size - 1, got rank {self.rank} of {self.world_size}")

    @property
    def round_size(self) -> int:
        """Items that all ranks together use for one batch each."""
        return self.batch_size * self.world_size

    def uses(self, number: int, items: int) -> bool:
        """Return whether this rank makes a batch of a round (from 0) of `items` items; only the last has fewer than
        `round_size`.
        """
        if items == self.round_size:
            return True
        if self.drop_last or (self.drop_last is None and self.training and number > 0):
            return False
        # In training either every rank gets a share of the last round or none does: one more batch on some would hang DDP.
        return items >= self.world_size if self.training else items > self.rank

    def batches(self, items: int) -> int:
        """Return the number of this rank's batches in an epoch of `items` items."""
        full, rest = divmod(items, self.round_size)
        return full + self.uses(full, rest)

    def require_enough(self, items: int, name: str) -> None:
        """Check that an epoch of `items` items, over all ranks, makes a batch.

        Raises:
            DataError: If it does not; names the data set.
        """
        if items == 0:
            raise DataError(f"the data set {name} has no items; expected at least one")
        if self.training and items < self.world_size:
            raise DataError(
                f"the training set {name} has {_count(items)} for {self.world_size} ranks; expected one each at least"
            )
        if self.drop_last and items < self.round_size:
            raise DataError(
                f"the data set {name} has {_count(items)}, a batch over {self.world_size} rank(s) takes {self.round_size} and "
                "drop_last leaves out a short one: nothing is left; take a smaller batch_size or drop_last=None"
            )


def _count(items: int) -> str:
    return "1 item" if items == 1 else f"{items} items"


@dataclass(frozen=True)
class BatchPlan:
    """One batch to make."""

    epoch: int  # the number of the epoch, from 0
    number: int  # the number of the batch in its rank's epoch, from 0
    items: list[int] | None = None  # the items' indices in the data set; None for a stream


@runtime_checkable
class OrdersItself(Protocol):
    """A data set with a length that defines a better order for training than a random one, such as neighbours together."""

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        """Return the items of one epoch: as many indices as the set has items, int64 of shape [len(self)].

        `generator`, seeded by the run's seed and the epoch, is the only source of randomness to use.
        """
        ...  # pragma: no cover


def stream_plans(epoch: int, *, skip: int) -> Iterator[BatchPlan]:
    """Plans without end, because only the stream knows its end."""
    return (BatchPlan(epoch, number) for number in count(skip))


def indexed_plans(dataset: Any, split: Split, *, seed: int, epoch: int, skip: int, shuffle: bool) -> Iterator[BatchPlan]:
    """Yield the plans of one rank's epoch.

    Raises:
        DataError: If the data set orders itself and does it wrong.
    """
    order = _order(dataset, generator(Purpose.ORDER, seed, epoch)) if shuffle else torch.arange(len(dataset))
    size = split.round_size
    for number in range(skip, split.batches(len(order))):
        mine = order[number * size + split.rank : (number + 1) * size : split.world_size]
        yield BatchPlan(epoch, number, mine.tolist())


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


T = TypeVar("T")


class _Next(IntEnum):
    """The state of a rank; the smallest state of all ranks decides."""

    FAILED = 0
    END = 1
    BATCH = 2


def until_one_ends(
    batches: Iterator[T], *, device: torch.device | None = None, group: distributed.ProcessGroup | None = None
) -> Iterator[T]:
    """Yield batches as long as every rank has another one.

    With DDP each backward pass waits for all ranks, so a rank with one batch more than the others would wait forever. Before
    each batch the ranks therefore agree, by an all_reduce of one number, that all have one. The surplus of longer ranks is left
    out. `torch.distributed.algorithms.join` would instead let the longer ranks train on alone with gradients of their own, and
    needs hooks in every collective of the loop; schedules and checkpoints count on equally many steps.

    Args:
        batches: The batches of this rank. Every rank of the group must call this, and exhaust it or stop at the same batch.
        device: The device that the group's backend needs: the rank's CUDA device with nccl; None is the CPU.
        group: The ranks that work in step; None is all of them.

    Yields:
        The batches, equally many on every rank.

    Raises:
        DataError: If the data of any rank cannot be read: all ranks stop instead of waiting for it.
    """
    try:
        while True:
            batch: T | None = None
            try:
                batch = next(batches)
                mine = _Next.BATCH
            except StopIteration:
                mine = _Next.END
            except Exception:
                _least(_Next.FAILED, device, group)
                raise
            common = _least(mine, device, group)
            if common is _Next.FAILED:
                raise DataError("the data of another rank cannot be read; see the message of that rank")
            if common is _Next.END:
                return
            yield batch  # type: ignore[misc]  # all ranks have one, so this one has
    finally:
        if isinstance(batches, Generator):  # a surplus stays in it: end its workers
            batches.close()


def _least(mine: _Next, device: torch.device | None, group: distributed.ProcessGroup | None) -> _Next:
    value = torch.tensor(int(mine), device=device)
    distributed.all_reduce(value, op=distributed.ReduceOp.MIN, group=group)
    return _Next(int(value.item()))
