"""Data sets that the tests of this folder read, and how they read them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from halfserve.amp_core.data import Batches

CPU = torch.device("cpu")
Pairs = list[tuple[Any, Any]]


def noise() -> Tensor:
    """One number from each generator that data sets share."""
    return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])  # noqa: NPY002, S311  (what users draw from)


class Numbers(Dataset[tuple[Tensor, int]]):
    """Item i is (noise, i)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        return noise(), item


class Stream(IterableDataset[tuple[Tensor, int]]):
    """(noise, i) for each i, without a length and without a thought of workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for item in range(self.length):
            yield noise(), item


class WorkerAware(Stream):
    """Gives each worker every n-th item, as torch's documentation teaches, without saying that it does."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for item in range(start, self.length, step):
            yield noise(), item


class SplitsItself(WorkerAware):
    """Says that it does."""

    splits_itself = True


def batches(dataset: Dataset[Any], *, size: int = 4, seed: int = 0, shuffle: bool = True, **more: Any) -> Batches:
    return Batches(dataset, batch_size=size, seed=seed, device=CPU, shuffle=shuffle, **more)


def read(dataset: Dataset[Any], *, epoch: int = 0, skip: int = 0, **settings: Any) -> Pairs:
    """All batches of an epoch."""
    with batches(dataset, **settings) as loader:
        return list(loader.epoch(epoch, skip=skip))


def items(pairs: Pairs) -> list[list[int]]:
    return [targets.tolist() for _, targets in pairs]


def flat(pairs: Pairs) -> list[int]:
    return [item for batch in items(pairs) for item in batch]


def assert_same(first: Pairs, second: Pairs) -> None:
    assert items(first) == items(second)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(first, second, strict=True))
