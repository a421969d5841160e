"""Two real processes that must take equally many steps."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.queues import Queue
from typing import Any

import pytest
from torch import distributed

from amp_core.data import DataError, until_one_ends
from tests.amp_core.data.sets import SplitsItself, batches, flat

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
