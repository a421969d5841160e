"""What the recipes train on: a smooth function of a few numbers, and a small network to learn it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUTS = 8


def device_in_use() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def regression(count: int = 256) -> tuple[Tensor, Tensor]:
    """Inputs of shape (count, 8) and targets of shape (count, 1), float32, always the same."""
    inputs = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(0))
    targets = torch.sin(inputs[:, :4].sum(1)) + inputs[:, 4] * inputs[:, 5]
    return inputs.to(device_in_use()), targets[:, None].to(device_in_use())


def network(outputs: int = 1, width: int = 64) -> nn.Sequential:
    """8 -> width -> width -> outputs, with the same weights each time; smooth, so that its gradient has a gradient too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(INPUTS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs)
    return nn.Sequential(*layers).to(device_in_use())
