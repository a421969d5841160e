"""The task that the tests of all frameworks train, and the loop that trains it without any."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfserve import GradScaler, Policy, autocast

LIGHTNING = [
    # Lightning on torch 2.13: its own use of torch's pytrees.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec. is deprecated:DeprecationWarning"),
    # Advice for speed, where the data is a dozen rows.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Advice to set the logging interval, where there is no logger.
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # The tests train on the CPU on any machine.
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


def silence_loggers() -> None:
    """Keep the banners out of the tests' output."""
    for name in ("lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


BATCHES = 12
OVERFLOWS = (3, 4, 8)  # the batches whose loss is infinite
CLIP = 0.5
devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
Result = tuple[list[Tensor], dict[str, Any], float]  # parameters, scaler's state, learning rate


class Net(nn.Module):
    """Shows the dtypes that its operations ran in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        shares = torch.softmax(hidden, dim=-1)
        self.dtypes = {"input": x.dtype, "linear": hidden.dtype, "softmax": shares.dtype}
        out: Tensor = self.last(shares)
        return out


def batches(order: Iterable[int] = range(BATCHES)) -> DataLoader[Any]:
    """Triples (inputs, targets, weights); the weights of a batch that is to overflow are infinite."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(BATCHES, 2, width, generator=generator) for width in (4, 1))
    weights = torch.ones(BATCHES, 2, 1)
    weights[list(OVERFLOWS)] = float("inf")
    chosen = list(order)
    return DataLoader(TensorDataset(*(part[chosen].flatten(0, 1) for part in (inputs, targets, weights))), batch_size=2)


def loss_of(net: nn.Module, batch: list[Tensor]) -> Tensor:
    device = next(net.parameters()).device
    inputs, targets, weights = (part.to(device) for part in batch)
    loss: Tensor = ((net(inputs).float() - targets).square() * weights).mean()
    return loss


def scaler_for_test(device: str = "cpu") -> GradScaler:
    """Grows and shrinks within a few steps, and meets a limit."""
    return GradScaler(device, init_scale=2.0**11, growth_interval=2, min_scale=2.0**9, max_scale=2.0**12)


def optimizer_of(net: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def plain_loop(*, policy: Policy | str | None = None, accumulate: int = 1, fused: bool = False, device: str = "cpu") -> Result:
    """Train with nothing but amp_core; the scheduler stands still when a step is skipped."""
    net = Net().to(device)
    optimizer = optimizer_of(net, fused=fused)
    scheduler, scaler = scheduler_of(optimizer), scaler_for_test(device)
    for index, batch in enumerate(batches(), start=1):
        with autocast(device, torch.float16, policy=policy):
            loss = loss_of(net, batch)
        torch.autograd.backward(scaler.scale(loss / accumulate))
        if index % accumulate:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped:
            scheduler.step()
        optimizer.zero_grad()
    return result(net, scaler.state_dict(), optimizer)


def result(net: nn.Module, scaler: dict[str, Any], optimizer: Any) -> Result:
    return [parameter.detach().clone() for parameter in net.parameters()], scaler, optimizer.param_groups[0]["lr"]


def assert_same(one: Result, other: Result) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert {key: one[1].get(key) for key in other[1]} == other[1]
    assert one[2] == other[2]
