"""A model in several processes: each runs its share of the batch, and the gradients become the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from amp_core.training.errors import TrainingError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amp_core.training.distributed import World


def in_parallel(model: nn.Module, device: torch.device, world: World) -> nn.Module:
    """Wrap a model for several processes; alone it stays as it is.

    Weights and buffers are those of rank 0. BatchNorm normalizes each process's share by itself, and its running statistics are
    those of rank 0's share: before each step they are copied to the others. For statistics over the whole batch let the
    factory return `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` (CUDA only).

    Raises:
        TrainingError: If the model differs from those of the other processes, or has parameters without a shape yet.
    """
    if world.size == 1:
        return model
    # Parameters that a step does not use are allowed. It also keeps DistributedDataParallel from sorting gradients anew after
    # its first step, which would let a resumed run add up in another order than an uninterrupted one.
    ids = [device.index] if device.type == "cuda" else None
    wrapped = _WithAnUnusedParameter(model).to(device)
    try:
        return DistributedDataParallel(wrapped, device_ids=ids, find_unused_parameters=True)
    except RuntimeError as error:
        raise TrainingError(f"the model cannot be trained in {world.size} processes: {one_line(error)}") from error


def require_same_data(data: Sequence[Dataset[Any]], world: World) -> None:
    """Refuse data sets whose lengths differ from those in the other processes, which share them out among themselves.

    Raises:
        TrainingError: If they do.
    """
    mine = ["an unknown number of" if isinstance(part, IterableDataset) else str(len(part)) for part in data]  # type: ignore[arg-type]  # (all others have a length)
    everywhere = world.gather(mine)
    for rank, (training, held_out) in enumerate(everywhere):
        if [training, held_out] != everywhere[0]:
            raise TrainingError(
                f"the data sets differ between the processes: rank 0 has {everywhere[0][0]} items to train on and "
                f"{everywhere[0][1]} held out, rank {rank} has {training} and {held_out}; return the same ones in each, "
                "they are shared out afterwards"
            )


class _WithAnUnusedParameter(nn.Module):
    """Told to find unused parameters, DistributedDataParallel warns where there is none, past Python's filters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)
