"""Where to train."""

from __future__ import annotations

import torch

from amp_core.policy.native_rules import has_autocast
from amp_core.training.distributed import World
from amp_core.training.errors import TrainingError


def training_device(name: str, world: World) -> torch.device:
    """Find the device, and see that it works.

    Args:
        name: `auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, ...
        world: Several processes take a GPU each, by their numbers on the machine.

    Raises:
        TrainingError: If there is no such device here, or several processes would share one GPU.
    """
    try:
        device = _named(name)
        if world.size > 1 and device.type == "cuda" and torch.cuda.is_available():
            device = _own_gpu(name, world)
        torch.empty(0, device=device)
    except TrainingError:
        raise
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(f"device {name!r} cannot be used here ({reason}); try 'cpu' or 'auto'") from error
    if not has_autocast(device.type):
        raise TrainingError(f"device {name!r} cannot be used here (torch has no autocast for it); try 'cpu' or 'auto'")
    return device


def _named(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return torch.device(name)


def _own_gpu(name: str, world: World) -> torch.device:
    if ":" in name:
        raise TrainingError(f"{world.size} processes cannot share {name!r}; use 'cuda', and each takes a GPU of its own")
    if world.local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"there are {torch.cuda.device_count()} GPUs here and more processes than that; start torchrun with "
            f"--nproc-per-node {torch.cuda.device_count()}"
        )
    own = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(own)
    return own
