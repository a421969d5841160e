"""Batches of data sets and streams: order, pairs, hooks, errors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import webdataset  # type: ignore[import-untyped]  # it ships no types
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from halfserve.amp_core.data import Batches, DataError
from halfserve.amp_core.data.sources import to_device
from tests.amp_core.data.sets import (
    CPU,
    Numbers,
    Pairs,
    SplitsItself,
    Stream,
    WorkerAware,
    assert_same,
    batches,
    flat,
    items,
    read,
)
from tests.amp_core.data.test_tar_shards import write_shard


@settings(deadline=None, max_examples=50)
@given(length=st.integers(4, 40), size=st.integers(1, 5), epoch=st.integers(0, 3), data=st.data(), iterable=st.booleans())
def test_skipping_leaves_the_tail_of_the_epoch(length: int, size: int, epoch: int, data: st.DataObject, iterable: bool) -> None:
    dataset = Stream(length) if iterable else Numbers(length)
    world = data.draw(st.integers(1, 3))
    choice: dict[str, Any] = {"size": size, "epoch": epoch, "rank": world - 1, "world_size": world}
    whole = read(dataset, **choice)
    skip = data.draw(st.integers(0, len(whole)))
    assert_same(read(dataset, skip=skip, **choice), whole[skip:])


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10))
def test_the_order_depends_on_seed_and_epoch(seed: int, epoch: int) -> None:
    dataset = Numbers(24)
    one = read(dataset, seed=seed, epoch=epoch)
    torch.rand(3)
    assert_same(read(dataset, seed=seed, epoch=epoch), one)
    assert flat(read(dataset, seed=seed, epoch=epoch + 1)) != flat(one)
    assert flat(read(dataset, seed=(seed + 1) % 2**63, epoch=epoch)) != flat(one)


def test_the_process_draws_as_if_nothing_had_been_drawn() -> None:
    states = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002  (the subject)
    for dataset in (Numbers(9), Stream(9)):
        for workers in (0, 2):
            read(dataset, workers=workers)
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])  # noqa: NPY002  (the subject)
    assert random.getstate() == states[2]


def test_drawing_between_batches_changes_nothing() -> None:
    for dataset in (Numbers(20), Stream(20)):
        disturbed: Pairs = []
        for batch in batches(dataset).epoch(0):
            disturbed.append(batch)
            torch.rand(5)
            random.random()  # noqa: S311  (the shared generator is the subject)
        assert_same(disturbed, read(dataset))


def test_items_draw_anew_in_each_batch_epoch_and_rank() -> None:
    one = torch.cat([inputs for inputs, _ in read(Numbers(40), seed=3)])
    assert len(set(one.flatten().tolist())) == 120
    for other in (read(Numbers(40), seed=3, epoch=1), read(Numbers(80), seed=3, rank=1, world_size=2)):
        assert not torch.isin(torch.cat([inputs for inputs, _ in other]), one).any()


def test_skipped_items_are_not_loaded() -> None:
    class Counting(Numbers):
        loaded = 0

        def __getitem__(self, item: int) -> tuple[Tensor, int]:
            self.loaded += 1
            return super().__getitem__(item)

    dataset = Counting(40)
    read(dataset, skip=9)
    assert dataset.loaded == 4


def test_two_epochs_may_run_side_by_side() -> None:
    loader = batches(Numbers(12), workers=1)
    with loader:
        both = list(zip(loader.epoch(0), loader.epoch(1), strict=True))
    assert_same([one for one, _ in both], read(Numbers(12), epoch=0))
    assert_same([other for _, other in both], read(Numbers(12), epoch=1))


def test_it_knows_how_many_batches_there_are() -> None:
    assert batches(Numbers(10)).batches_per_epoch() == 2
    assert batches(Numbers(10), shuffle=False).batches_per_epoch() == 3
    assert batches(Stream(10)).batches_per_epoch() is None


def test_it_knows_whether_ranks_may_differ() -> None:
    assert batches(Stream(10)).same_on_all_ranks
    assert batches(Numbers(10), world_size=2).same_on_all_ranks
    assert not batches(Numbers(10), world_size=2, shuffle=False).same_on_all_ranks
    assert not batches(Stream(10), world_size=2).same_on_all_ranks


def test_skipping_more_than_there_is_says_so_at_once() -> None:
    with pytest.raises(DataError, match=r"cannot skip 4 batches of Numbers: an epoch has 3; has the data changed\?"):
        batches(Numbers(12)).epoch(0, skip=4)


def test_a_set_without_length_that_is_no_stream_is_refused() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, item: int) -> int:
            return item

    with pytest.raises(DataError, match=r"Endless has neither a length nor is it a torch IterableDataset"):
        read(Endless())


class Fancy(Numbers):
    """With every hook that there is."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        return torch.arange(self.length).flip(0).roll(int(torch.randint(1, (1,), generator=generator)))

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [100 * self.epoch + index for index in indices]

    def collate_fn(self, fetched: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(fetched), torch.tensor(fetched)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_may_bring_its_own_order_fetching_and_stacking(workers: int) -> None:
    with batches(Fancy(8), workers=workers) as loader:
        assert items(list(loader.epoch(0))) == [[7, 6, 5, 4], [3, 2, 1, 0]]
        assert items(list(loader.epoch(2, skip=1))) == [[203, 202, 201, 200]]


def test_an_order_of_another_length_is_refused() -> None:
    class Short(Fancy):
        def epoch_order(self, generator: torch.Generator) -> Tensor:
            return super().epoch_order(generator)[1:]

    with pytest.raises(DataError, match=r"Short.epoch_order returned torch.int64 of shape \[7\]; expected 8 whole numbers"):
        read(Short(8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_on_cuda_with_the_same_values(workers: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    dataset = TensorDataset(torch.randn(32, 3), torch.arange(32))
    with Batches(dataset, batch_size=8, seed=0, device=device, shuffle=True, workers=workers) as loader:
        there = list(loader.epoch(0))
    assert {tensor.device for pair in there for tensor in pair} == {device}
    assert_same([(inputs.to(CPU), targets.to(CPU)) for inputs, targets in there], read(dataset, size=8))


def test_ranks_and_workers_share_a_stream_that_knows_of_neither() -> None:
    ranks = [read(Stream(30), shuffle=False, workers=2, rank=rank, world_size=3) for rank in range(3)]
    assert items(ranks[1]) == [[1, 4, 7, 10], [13, 16, 19, 22], [25, 28]]
    assert Counter(item for rank in ranks for item in flat(rank)) == Counter(range(30))


def test_a_stream_that_splits_silently_by_worker_loses_nothing() -> None:
    assert_same(read(WorkerAware(30), workers=2), read(Stream(30)))


def test_a_stream_that_splits_itself_is_left_alone() -> None:
    with batches(SplitsItself(22), shuffle=False, workers=2) as loader:
        first = list(loader.epoch(0))
        assert items(first) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15], [16, 18, 20], [17, 19, 21]]
        assert_same(list(loader.epoch(0, skip=2)), first[2:])


class Uneven(SplitsItself):
    """Its second worker has nothing."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from (pair for pair in Stream(12) if next(super(Uneven, self).__iter__(), (None, 1))[1] == 0)


def test_a_worker_that_ends_first_does_not_end_the_epoch() -> None:
    with batches(Uneven(12), workers=2) as loader:
        assert items(list(loader.epoch(0))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert items(list(loader.epoch(1, skip=2))) == [[8, 9, 10, 11]]


def test_skipping_more_than_there_is_says_so() -> None:
    with pytest.raises(DataError, match=r"the stream SplitsItself ended before the 9 batches to skip; has the data changed\?"):
        read(SplitsItself(12), skip=9)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_stream_that_splits_itself_is_refused_in_training(workers: int) -> None:
    with pytest.raises(DataError, match=r"the stream SplitsItself gave rank 0 no items"):
        read(SplitsItself(0), workers=workers)


class Epochs(Stream):
    """Says which epoch it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((noise, self.epoch) for noise, _ in super().__iter__())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_told_the_epoch_before_it_starts(workers: int) -> None:
    with batches(Epochs(4), workers=workers) as loader:
        assert [flat(list(loader.epoch(epoch))) for epoch in (3, 1)] == [[3] * 4, [1] * 4]


def test_webdataset_pipelines_split_themselves(tmp_path: Path) -> None:
    for shard in range(3):
        write_shard(tmp_path / f"{shard}.tar", range(5 * shard, 5 * shard + 5))
    pipeline = (
        webdataset.WebDataset(str(tmp_path / "{0..2}.tar"), shardshuffle=False).decode().to_tuple("image.npy", "label.cls")
    )
    pairs = read(pipeline, shuffle=False, workers=2)
    assert Counter(flat(pairs)) == Counter(range(15))
    assert all((inputs[:, 0] == targets).all() for inputs, targets in pairs)


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
