"""A model in several processes: each runs its share of the batch, and the gradients become the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from amp_core.training.distributed import World


def in_parallel(model: nn.Module, device: torch.device, world: World) -> nn.Module:
    """Wrap a model for several processes; alone it stays as it is.

    Weights and buffers are those of rank 0. BatchNorm normalizes each process's share by itself, and its running statistics are
    those of rank 0's share: before each step they are copied to the others. For statistics over the whole batch let the
    factory return `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` (CUDA only).
    """
    if world.size == 1:
        return model
    # Parameters that a step does not use are allowed. It also keeps DistributedDataParallel from sorting gradients anew after
    # its first step, which would let a resumed run add up in another order than an uninterrupted one.
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(_WithAnUnusedParameter(model).to(device), device_ids=ids, find_unused_parameters=True)


class _WithAnUnusedParameter(nn.Module):
    """Told to find unused parameters, DistributedDataParallel warns where there is none, past Python's filters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)
