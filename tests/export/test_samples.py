from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from export.errors import ExportError
from export.samples import take_samples


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_inputs_are_stacked_and_whole_targets_are_labels() -> None:
    found = take_samples(Items((torch.zeros(3), 1), (torch.ones(3), torch.tensor(2)), (torch.ones(3), 0)), 2)
    assert [tensor.tolist() for tensor in found.inputs] == [[[0, 0, 0], [1, 1, 1]]]
    assert found.labels is not None
    assert found.labels.tolist() == [1, 2]


def test_several_inputs_stay_apart() -> None:
    found = take_samples(Items(((torch.zeros(3), torch.ones(2)), 0)), 5)
    assert [tuple(tensor.shape) for tensor in found.inputs] == [(1, 3), (1, 2)]


@pytest.mark.parametrize("target", [1.5, torch.tensor(0.5), torch.zeros(2, dtype=torch.long), "cat"])
def test_other_targets_are_no_labels(target: Any) -> None:
    assert take_samples(Items((torch.zeros(3), target)), 1).labels is None


@pytest.mark.parametrize(
    ("items", "count", "message"),
    [
        ([(torch.zeros(3), 0), (torch.zeros(4), 0)], 2, "the held-out inputs cannot be stacked: stack expects each tensor"),
        ([torch.zeros(3)], 1, r"must hold pairs \(input, target\)"),
        ([(torch.zeros(3), 0)], 0, "samples is 0; expected at least 1"),
        ([("text", 0)], 1, "the held-out inputs cannot be stacked"),
    ],
)
def test_what_cannot_be_stacked_is_refused(items: list[Any], count: int, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        take_samples(Items(*items), count)
