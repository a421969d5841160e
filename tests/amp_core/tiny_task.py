"""A task small enough to train in a test: which side of a line a point is on. Also, tasks that cannot be trained."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

HERE = "tests.amp_core.tiny_task"
ANNOUNCEMENT = 65536  # in bytes: what a pipe holds


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


def halved() -> nn.Module:
    return model().half()


class Overflowing(nn.Module):
    """Overflows float16 in its gradient until the loss scale is below 2**10."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 64.0


def plain() -> nn.Module:
    """Without what makes a share of a batch differ from the whole."""
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def plain_with_a_frozen_layer() -> nn.Module:
    made = plain()
    made.get_submodule("0").requires_grad_(False)
    return made


class Counting(nn.Module):
    """Keeps a number that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = plain(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y: Tensor = self.inner(x)
        return y

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Announcing(nn.Module):
    """Draws from every generator, and tells the pipe that ANNOUNCE names of each forward pass in training."""

    def __init__(self, ballast: int = 1) -> None:
        super().__init__()
        self.inner = model()
        self.register_buffer("ballast", torch.zeros(ballast))
        named = os.environ.get("ANNOUNCE")
        self.pipe = Path(named).open("wb") if named else None  # noqa: SIM115  (as long as the model lives)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.pipe is not None:
                self.pipe.write(bytes(ANNOUNCEMENT))
                self.pipe.flush()
            x = x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())  # noqa: NPY002, S311  (what models use)
        y: Tensor = self.inner(x)
        return y


def announcing_bulky() -> nn.Module:
    return Announcing(ballast=2_000_000)


class LostInTheMiddle(nn.Module):
    """Its second layer divides by zero once the model is trained, whatever the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.divide, self.last = nn.Linear(2, 2), Divide(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.divide(self.first(x)))
        return y


class Divide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


class Squares(nn.Module):
    """Overflows float16 in forward, and float32 not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scaled = nn.Linear(2, 2), Times1e6()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scaled(self.linear(x)) * 1e-6
        return y


class Times1e6(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1e6


def root_loss(outputs: Tensor, _: Tensor) -> Tensor:
    """Finite, with a gradient that is not."""
    return (outputs.float() * 0).abs().sqrt().mean()


def nan_loss(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.float().mean() * float("nan")


class Words(nn.Module):
    """Whose gradient is sparse, or the same without being so."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 2, sparse=sparse)
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.words(x).sum(1))
        return y


def sparse_words() -> nn.Module:
    return Words(sparse=True)


def dense_words() -> nn.Module:
    return Words(sparse=False)


def sentences() -> tuple[TensorDataset, TensorDataset]:
    words = torch.randint(0, 20, (80, 3), generator=torch.Generator().manual_seed(7))
    long = (words.sum(1) > 30).long()
    return TensorDataset(words[:64], long[:64]), TensorDataset(words[64:], long[64:])


def one_poisoned() -> tuple[TensorDataset, TensorDataset]:
    """One item overflows float16."""
    train, held_out = data()
    train.tensors[0][5] = 1e7
    return train, held_out


def one_infinite() -> tuple[TensorDataset, TensorDataset]:
    train, held_out = data()
    train.tensors[0][:] = float("inf")
    return train, held_out


class Broken(Dataset[tuple[Tensor, Tensor]]):
    """One of its items cannot be read."""

    def __init__(self, whole: TensorDataset) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 77:
            raise OSError("the disk has a hole")
        point, side = self.whole[index]
        return point, side


def broken() -> tuple[Dataset[tuple[Tensor, Tensor]], TensorDataset]:
    train, held_out = data()
    return Broken(train), held_out


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, whole: TensorDataset) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.whole[index] for index in range(len(self.whole)))


def streams() -> tuple[Stream, Stream]:
    train, held_out = data()
    return Stream(train), Stream(held_out)


def empty_streams() -> tuple[Stream, Stream]:
    nothing = TensorDataset(torch.ones(0, 2), torch.ones(0))
    return Stream(nothing), Stream(nothing)


def sgd(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def sgd_with_a_number_of_numpy(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, weight_decay=np.float64(0.01))


def sgd_of_the_last_layer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return sgd(parameters[-2:], lr)


def rate_in_a_tensor(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(lr), foreach=False)


def no_optimizer(parameters: list[nn.Parameter], lr: float) -> float:
    return lr * len(parameters)
