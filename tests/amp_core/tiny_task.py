"""A task small enough to train in a test: which side of a line a point is on. Also, tasks that cannot be trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

HERE = "tests.amp_core.tiny_task"


def data() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(160, 2, generator=generator)
    sides = (points.sum(1) > 0).long()
    return TensorDataset(points[:128], sides[:128]), TensorDataset(points[128:], sides[128:])


def regression_data() -> tuple[TensorDataset, TensorDataset]:
    points = torch.linspace(-1, 1, 32).reshape(-1, 1)
    return TensorDataset(points, 2 * points), TensorDataset(points[::4], 2 * points[::4])


def triples() -> tuple[TensorDataset, TensorDataset]:
    x = torch.ones(4, 2)
    return TensorDataset(x, x, x), TensorDataset(x, x, x)


def model() -> nn.Module:
    # Dropout draws random numbers in training: a resumed run must go on drawing the same ones.
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def line() -> nn.Module:
    return nn.Linear(1, 1)


def wrong_width() -> nn.Module:
    return nn.Linear(5, 2)


def without_parameters() -> nn.Module:
    return nn.ReLU()


def halved() -> nn.Module:
    return model().half()


def infinite_loss(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.float().sum() * float("inf")


class Overflowing(nn.Module):
    """Overflows float16 in its gradient until the loss scale is below 2**10."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 64.0


def overflowing() -> nn.Module:
    return Overflowing()
