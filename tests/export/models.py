"""Small torch models and one data set, by factory, as a checkpoint names them: real layers, made from a seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10


class Lstm(nn.Module):
    """(batch, 5, 8) -> (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.head(self.lstm(sequence)[0][:, -1])  # type: ignore[no-any-return]  # (nn.Module's call is untyped)


class TwoHeads(nn.Module):
    """(batch, 4) and its mask -> a dict of two tensors."""

    def forward(self, features: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"masked": features * mask, "total": features.sum(-1)}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES)).eval()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    model(torch.rand(16, 1, 8, 8))  # so that the running statistics are not 0 and 1
    return model.eval()


def lstm() -> nn.Module:
    torch.manual_seed(0)
    return Lstm().eval()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()


def images() -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(40, 1, 8, 8, generator=generator), torch.randint(0, CLASSES, (40,), generator=generator))
    return data, data


def rows() -> tuple[TensorDataset, TensorDataset]:
    data = TensorDataset(torch.linspace(0.5, 1, 40).reshape(10, 4), torch.zeros(10, dtype=torch.long))
    return data, data


def counts() -> tuple[TensorDataset, TensorDataset]:
    data = TensorDataset(torch.linspace(0.5, 1, 40).reshape(10, 4), torch.arange(10))
    return data, data


class Pricing(nn.Module):
    """Two outputs of which float16 holds one: the price is about 3e5."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.click, self.cents = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x).relu()
        return {"click": self.click(y), "price": 3e5 + 1e5 * self.cents(y)}


class Counting(nn.Module):
    """One number for each sample, beside what it is made of."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.linear, self.whole = nn.Linear(4, 4), whole

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.linear(x)
        return (parts[:, None].repeat(1, 5, 1) if self.whole else parts.sum(1)), parts


def counting() -> nn.Module:
    return Counting(whole=False)


def tagging() -> nn.Module:
    return Counting(whole=True)


def few_classes() -> nn.Module:
    return nn.Linear(4, 3)


def pricing() -> nn.Module:
    torch.manual_seed(0)
    return Pricing().eval()


def peaking() -> nn.Module:
    """Sums of up to 2.4e5 between two layers, which nothing but running it tells."""
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, CLASSES, bias=False)
    with torch.no_grad():
        first.weight.fill_(6e4)
        last.weight.copy_(torch.arange(4.0 * CLASSES).reshape(CLASSES, 4) * 1e-6)
    return nn.Sequential(nn.Tanh(), first, nn.ReLU(), last).eval()
