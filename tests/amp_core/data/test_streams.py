"""Data sets without a length, over ranks and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import webdataset  # type: ignore[import-untyped]  # it ships no types
from torch import Tensor

from amp_core.data import DataError
from tests.amp_core.data.sets import SplitsItself, Stream, WorkerAware, assert_same, batches, flat, items, read
from tests.amp_core.data.tars import write_shard


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
