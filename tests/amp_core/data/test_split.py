"""Epochs split between ranks, which stop together."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from multiprocessing.queues import Queue
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from halfserve.amp_core.data import DataError, until_one_ends
from halfserve.amp_core.data.split import Split
from tests.amp_core.data.sets import Numbers, SplitsItself, Stream, batches, flat, read

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


Answers = dict[str, list[Any]]


def _endless_then_failing(rank: int) -> Iterator[int]:
    yield from range(2)
    if rank == 1:
        raise DataError("the net is down")
    yield from range(100)


def _uneven_stream(rank: int) -> list[int]:
    with batches(SplitsItself(8 + 8 * rank), workers=1, rank=rank, world_size=2) as loader:
        return flat(list(until_one_ends(loader.epoch(0))))


def _outcome(rank: int) -> list[Any]:
    taken: list[Any] = []
    try:
        taken.extend(until_one_ends(_endless_then_failing(rank)))
    except DataError as error:
        taken.append(str(error))
    return taken


def _work(rank: int, meeting: str, answers: Queue[tuple[int, Answers]]) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mine: Answers = {
        "uneven": list(until_one_ends(iter(range(3 + 2 * rank)))),
        "even": list(until_one_ends(iter(range(2)))),
        "empty": list(until_one_ends(iter(range(rank)))),
        "stream": _uneven_stream(rank),
        "failing": _outcome(rank),
    }
    distributed.destroy_process_group()
    answers.put((rank, mine))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Answers]:
    context = multiprocessing.get_context("fork")
    queue: Queue[tuple[int, Answers]] = context.Queue()
    meeting = str(tmp_path_factory.mktemp("gloo") / "meeting")
    processes = [context.Process(target=_work, args=(rank, meeting, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    both = dict(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    return [both[0], both[1]]


@pytest.mark.parametrize(("name", "steps"), [("uneven", 3), ("even", 2), ("empty", 0)])
def test_the_shortest_rank_decides(answers: list[Answers], name: str, steps: int) -> None:
    assert [answer[name] for answer in answers] == [list(range(steps))] * 2


def test_a_surplus_of_a_stream_with_workers_is_left_out(answers: list[Answers]) -> None:
    assert [answer["stream"] for answer in answers] == [list(range(8))] * 2


def test_no_rank_waits_for_one_whose_data_fails(answers: list[Answers]) -> None:
    assert answers[1]["failing"] == [0, 1, "the net is down"]
    assert answers[0]["failing"] == [0, 1, "the data of another rank cannot be read; see the message of that rank"]
