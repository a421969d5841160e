"""What a batch may be made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from amp_core.data import DataError
from amp_core.data.pairs import to_device
from tests.amp_core.data.sets import CPU, Numbers, read


class Made(Numbers):
    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__(4)
        self.make = make

    def __getitem__(self, item: int) -> Any:
        return self.make(item)


class Point(NamedTuple):
    x: Any
    y: Any


def test_parts_may_be_nested() -> None:
    dataset = Made(lambda item: ({"a": torch.tensor(item), "b": (1.0, [np.zeros(2)])}, Point(item, 2)))
    [(inputs, targets)] = read(dataset, shuffle=False)
    assert inputs["a"].tolist() == [0, 1, 2, 3]
    assert inputs["b"][1][0].shape == (4, 2)
    assert isinstance(targets, Point)
    assert targets.x.tolist() == [0, 1, 2, 3]


def test_moving_keeps_the_structure() -> None:
    value: dict[str, Any] = {"a": (torch.zeros(1), [torch.ones(2)]), "b": Point(torch.zeros(1), torch.zeros(1))}
    moved = to_device(value, torch.device("meta"))
    assert moved["a"][1][0].device.type == "meta"
    assert isinstance(moved["a"], tuple)
    assert isinstance(moved["b"], Point)
    assert moved["b"].y.device.type == "meta"
    kept: Tensor = to_device(value, CPU)["a"][0]
    assert kept is value["a"][0]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda item: item, "but Made gives int"),
        (lambda item: {"input": item}, "but Made gives dict"),
        (lambda _: (1, 2, 3), "but Made gives 3 things at a time"),
        (lambda item: (item, "text"), "but Made has str among them"),
        (lambda item: (item, {"a": ["text"]}), "but Made has str among them"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_other_items_are_refused(make: Callable[[int], Any], reason: str, workers: int) -> None:
    with pytest.raises(DataError, match=f"^the data's items must be pairs .input, target. of tensors or numbers, {reason}$"):
        read(Made(make), workers=workers)


def test_items_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"the items of Made do not make a batch, RuntimeError: stack expects .* same shapes"):
        read(Made(lambda item: (torch.zeros(item + 1), 0)))
