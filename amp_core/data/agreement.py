"""Ranks that work in step must also stop in step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from enum import IntEnum
from typing import TypeVar

import torch
from torch import distributed

from amp_core.data.errors import DataError

T = TypeVar("T")


class _Next(IntEnum):
    """What a rank has; the least of all ranks' decides."""

    FAILED = 0
    END = 1
    BATCH = 2


def until_one_ends(
    batches: Iterator[T], *, device: torch.device | None = None, group: distributed.ProcessGroup | None = None
) -> Iterator[T]:
    """Go through batches as long as every rank has another one.

    With DDP each backward pass waits for all ranks, so a rank with one batch more than the others would wait for ever. Before
    each batch the ranks therefore agree, by an all_reduce of one number, that all have one. What a rank has beyond that is
    left out: with streams that split themselves by shards that is a rank's surplus over the shortest. The other way,
    `torch.distributed.algorithms.join`, would let the longer ranks train on alone with gradients of their own and needs hooks
    in every collective of the loop; evenly many steps are what schedules and checkpoints count on.

    Args:
        batches: Of this rank. Every rank of the group must call this, and go through it to the end or stop at the same batch.
        device: Where the group's backend needs its tensors: the rank's CUDA device with nccl; None is the CPU.
        group: The ranks that work in step; None is all of them.

    Yields:
        The batches, equally many on every rank.

    Raises:
        DataError: If this rank's data cannot be read, or another's: then all stop, instead of waiting for the one that did.
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
