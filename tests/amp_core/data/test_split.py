"""The rule by which items are dealt."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.data import DataError
from amp_core.data.split import Split
from tests.amp_core.data.sets import Numbers, Stream, flat, read

SIZES = st.integers(1, 5)
WORLDS = st.integers(1, 4)
DROPS = st.sampled_from([None, False, True])


@settings(deadline=None, max_examples=50)
@given(length=st.integers(1, 60), size=SIZES, world=WORLDS, iterable=st.booleans())
def test_evaluation_gives_each_item_exactly_once(length: int, size: int, world: int, iterable: bool) -> None:
    dataset = Stream(length) if iterable else Numbers(length)
    ranks = [read(dataset, size=size, shuffle=False, rank=rank, world_size=world) for rank in range(world)]
    assert Counter(item for rank in ranks for item in flat(rank)) == Counter(range(length))
    assert max(len(rank) for rank in ranks) - min(len(rank) for rank in ranks) <= 1


@settings(deadline=None, max_examples=50)
@given(length=st.integers(4, 60), size=SIZES, world=WORLDS, drop=st.sampled_from([None, False]), iterable=st.booleans())
def test_training_gives_all_ranks_as_many_batches_and_no_item_twice(
    length: int, size: int, world: int, drop: bool | None, iterable: bool
) -> None:
    dataset = Stream(length) if iterable else Numbers(length)
    ranks = [read(dataset, size=size, drop_last=drop, rank=rank, world_size=world) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    counts = Counter(item for rank in ranks for item in flat(rank))
    assert set(counts) <= set(range(length))
    assert set(counts.values()) == {1}
    left_out = length - len(counts)
    assert left_out < (world if drop is False else size * world)


@settings(deadline=None, max_examples=50)
@given(length=st.integers(4, 60), size=SIZES, world=WORLDS)
def test_training_has_full_batches_unless_there_is_but_one(length: int, size: int, world: int) -> None:
    pairs = read(Numbers(length), size=size, world_size=world)
    lengths = [len(targets) for _, targets in pairs]
    assert len(lengths) == 1 or set(lengths) == {size}


@settings(deadline=None, max_examples=50)
@given(length=st.integers(4, 60), size=SIZES, world=WORLDS, drop=DROPS, training=st.booleans())
def test_the_number_of_batches_is_known_beforehand(
    length: int, size: int, world: int, drop: bool | None, training: bool
) -> None:
    for rank in range(world):
        split = Split(batch_size=size, rank=rank, world_size=world, training=training, drop_last=drop)
        full = length // (size * world)
        made = [split.uses(number, min(split.round_size, length - number * split.round_size)) for number in range(full + 1)]
        assert split.batches(length) == sum(made)


def test_a_set_smaller_than_a_batch_is_one_short_batch() -> None:
    assert sorted(flat(read(Numbers(3), size=8))) == [0, 1, 2]
    assert flat(read(Stream(3), size=8)) == [0, 1, 2]


@pytest.mark.parametrize("dataset", [Numbers(0), Stream(0)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_empty_set_is_refused(dataset: Numbers | Stream, shuffle: bool) -> None:
    with pytest.raises(DataError, match=r"the data set (Numbers|Stream) has no items; expected at least one"):
        read(dataset, shuffle=shuffle)


@pytest.mark.parametrize("dataset", [Numbers(1), Stream(1)])
def test_fewer_items_than_ranks_are_refused_in_training(dataset: Numbers | Stream) -> None:
    for rank in range(2):
        with pytest.raises(DataError, match=r"has 1 item for 2 ranks; expected one each at least"):
            read(dataset, rank=rank, world_size=2)


@pytest.mark.parametrize("dataset", [Numbers(3), Stream(3)])
def test_dropping_everything_is_refused(dataset: Numbers | Stream) -> None:
    with pytest.raises(DataError, match=r"has 3 items, a batch over 1 rank\(s\) takes 4 .* take a smaller batch_size"):
        read(dataset, drop_last=True)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match="batch_size must be at least 1, got 0"):
        read(Numbers(3), size=0)
    with pytest.raises(DataError, match="got rank 2 of 2"):
        read(Numbers(3), rank=2, world_size=2)
    with pytest.raises(DataError, match="workers must be 0 .none. or above, got -1"):
        read(Numbers(3), workers=-1)
    with pytest.raises(DataError, match=r"seed must be between 0 and 2\*\*63 - 1, got -1"):
        read(Numbers(3), seed=-1)
    with pytest.raises(DataError, match="epoch and skip must be 0 or above, got 0 and -1"):
        read(Numbers(3), skip=-1)
