from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from halfserve.export.export_errors import ExportError
from halfserve.export.samples import DTYPES, inputs_from_descriptions, take_samples

A = torch.zeros(3)


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_inputs_are_stacked_and_whole_targets_are_labels() -> None:
    found = take_samples(Items((torch.zeros(3), 1), (torch.ones(3), torch.tensor(2)), (torch.ones(3), 0)), 2)
    assert found.inputs.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert found.labels is not None
    assert found.labels.tolist() == [1, 2]


def test_several_inputs_stay_apart() -> None:
    found = take_samples(Items(((torch.zeros(3), torch.ones(2)), 0)), 5)
    assert [tuple(tensor.shape) for tensor in found.inputs] == [(1, 3), (1, 2)]


def test_inputs_by_name_keep_their_names() -> None:
    items = Items(*(({"x": torch.zeros(3), "more": [number, torch.ones(2)]}, 0) for number in range(3)))
    found = take_samples(items, 2).inputs
    assert list(found) == ["x", "more"]
    assert found["x"].shape == (2, 3)
    assert found["more"][0].tolist() == [0, 1]
    assert found["more"][1].shape == (2, 2)


class Collating(Items):
    def collate_fn(self, items: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([row for row, _ in items]), torch.tensor([label for _, label in items])


def test_a_data_sets_own_collate_fn_stacks() -> None:
    found = take_samples(Collating((torch.ones(2), 1), (torch.ones(4), 0)), 9)
    assert found.inputs.shape == (4, 2)
    assert found.labels is not None
    assert found.labels.tolist() == [1, 0]


class Failing(Items):
    def collate_fn(self, _: list[Any]) -> Any:
        raise KeyError("missing")


class NoPair(Items):
    def collate_fn(self, items: list[Any]) -> Any:
        return items[0][0]


class NoTensors(Items):
    def collate_fn(self, items: list[Any]) -> Any:
        return "text", len(items)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Failing, "raised KeyError: 'missing'"),
        (NoPair, r"must return a pair \(inputs, targets\)"),
        (NoTensors, "that are tensors"),
    ],
)
def test_a_collate_fn_that_gives_something_else_is_refused(kind: type[Items], message: str) -> None:
    with pytest.raises(ExportError, match=f"collate_fn.*{message}"):
        take_samples(kind((torch.zeros(3), 0)), 1)


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
        ([({"x": A}, 0), ({"y": A}, 0)], 2, "item 1 is nested differently from item 0"),
        ([((A, A), 0), (A, 0)], 2, "item 1 is nested differently from item 0"),
    ],
)
def test_what_cannot_be_stacked_is_refused(items: list[Any], count: int, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        take_samples(Items(*items), count)


@given(dtype=st.sampled_from(sorted(DTYPES)), sizes=st.lists(st.integers(0, 4), max_size=4), limit=st.integers(1, 100))
def test_a_description_gives_what_it_says(dtype: str, sizes: list[int], limit: int) -> None:
    (made,) = inputs_from_descriptions([f"{dtype}{sizes}<{limit}"]).args
    assert (made.dtype, list(made.shape)) == (DTYPES[dtype], sizes)
    if not made.is_floating_point() and made.numel():
        assert 0 <= int(made.max()) < max(limit, 2)


def test_names_and_order() -> None:
    inputs = inputs_from_descriptions(["int64[2,3]<9", "mask=bool[2,3]", "float32[]"])
    assert [made.dtype for made in inputs.args] == [torch.int64, torch.float32]
    assert list(inputs.kwargs) == ["mask"]
    assert torch.equal(inputs_from_descriptions(["float32[3]"]).args[0], inputs_from_descriptions(["float32[3]"]).args[0])


@pytest.mark.parametrize("text", ["", "float32", "float32[2", "float[2]", "float32[-1]", "2,3", "x=y=float32[1]"])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ExportError, match="expected DTYPE"):
        inputs_from_descriptions([text])
