"""Sequences: order, states, failures, slots, idle limits and drain."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    QueueFullError,
    RequestCancelledError,
    UnavailableError,
)
from tests.serve.engine.sequences.scene import STATE, WAIT_S, Scene, play, played, sum_model

NOT_RUNNING = (
    "sequence 1 of model 'sum' is not running: it was not started, has ended, or had no request for 60 s; send its first "
    "request with sequence_start"
)


@played(sum_model)
async def test_a_state_goes_from_request_to_request(scene: Scene) -> None:
    assert [await scene.step(1, x, start=x == 3) for x in (3, 4, 5)] == [3, 7, 12]
    assert await scene.step("1", 9, start=True) == 9  # a string is another id
    assert await scene.step(1, 1, end=True) == 13
    assert scene.scheduler.running_sequences == 1


@played(sum_model)
async def test_requests_of_many_sequences_share_a_batch(scene: Scene) -> None:
    await asyncio.gather(*(scene.step(key, key, start=True) for key in range(1, 5)))
    answers = await asyncio.gather(*(scene.step(key, 10) for key in range(1, 5)))
    assert answers == [11, 12, 13, 14]
    assert scene.held.batches == [[1, 2, 3, 4], [10, 10, 10, 10]]


@played(sum_model)
async def test_requests_of_one_sequence_run_one_after_the_other(scene: Scene) -> None:
    answers = [scene.send(1, 1, start=True), scene.send(2, 5, start=True), scene.send(1, 2), scene.send(1, 3, end=True)]
    assert [float((await one)["y"][0, 0]) for one in answers] == [1, 5, 3, 6]
    assert scene.held.batches == [[1, 5], [2], [3]]
    assert scene.scheduler.waiting == 0


@played(sum_model)
async def test_a_request_without_a_start_is_refused(scene: Scene) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        scene.send(1, 1)
    assert str(refusal.value) == NOT_RUNNING
    await scene.step(1, 1, start=True, end=True)
    with pytest.raises(InvalidArgumentError, match="sequence 1 of model 'sum' is not running"):
        scene.send(1, 1)
    scene.send(1, 1, start=True)
    last = scene.send(1, 1, end=True)
    with pytest.raises(InvalidArgumentError, match="is not running"):  # the one that ends it still waits
        scene.send(1, 1)
    await last
    assert scene.model.statistics.totals.failures == {"invalid_argument": 3}


def test_a_second_start_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(scene: Scene) -> None:
        assert await scene.step(1, 3, start=True) == 3
        answers = [scene.send(1, 4), scene.send(1, 5, start=True), scene.send(1, 6)]
        assert [float((await one)["y"][0, 0]) for one in answers] == [7, 5, 11]
        assert scene.scheduler.running_sequences == 1

    play(sum_model(tmp_path), test)
    assert caplog.text.count("sum: sequence 1 begins again before it has ended") == 1


@played(sum_model)
async def test_a_sequence_may_start_while_its_last_one_ends(scene: Scene) -> None:
    answers = [scene.send(1, 3, start=True, end=True), scene.send(1, 4, start=True), scene.send(1, 5)]
    assert [float((await one)["y"][0, 0]) for one in answers] == [3, 4, 9]


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"sequence_id": 0}, "model 'sum' takes sequences: set the parameter 'sequence_id' to a number other than 0"),
        ({"sequence_id": ""}, "model 'sum' takes sequences"),
        ({"sequence_id": True}, "parameter 'sequence_id' is True, expected a whole number or a string"),
        ({"sequence_id": 1.5}, "parameter 'sequence_id' is 1.5, expected a whole number or a string"),
        ({"sequence_id": "x" * 129}, "parameter 'sequence_id' has 129 bytes, expected at most 128"),
        ({"sequence_start": 1}, "parameter 'sequence_start' is 1, expected true or false"),
    ],
)
@played(sum_model)
async def test_wrong_parameters_are_refused(scene: Scene, parameters: dict[str, bool | int | float | str], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        scene.send(1, 1, start=True, more=parameters)


@played(sum_model)
async def test_a_failed_request_has_not_happened_and_fails_those_behind_it(scene: Scene) -> None:
    await scene.step(1, 3, start=True)
    beside = scene.send(2, 5, start=True)
    failing, behind = scene.send(1, 1000), scene.send(1, 4)
    with pytest.raises(BackendError):
        await failing
    with pytest.raises(FailedPreconditionError, match="a request of sequence 1 of model 'sum' failed before this one"):
        await behind
    assert float((await beside)["y"][0, 0]) == 5
    assert await scene.step(1, 4) == 7


@played(sum_model)
async def test_a_sequence_whose_first_request_fails_does_not_begin(scene: Scene) -> None:
    with pytest.raises(BackendError):
        await scene.send(1, 1000, start=True)
    with pytest.raises(InvalidArgumentError, match="is not running"):
        scene.send(1, 1)
    assert scene.scheduler.running_sequences == 0


@played(sum_model)
async def test_a_cancelled_request_has_not_happened(scene: Scene) -> None:
    await scene.step(1, 3, start=True)
    await scene.until_computing()
    await scene.hold()
    computing, _ = scene.request(1, 40)
    scene.scheduler.submit(computing)
    await scene.until_computing()
    behind = scene.send(1, 5)
    scene.scheduler.cancel(computing)
    scene.scheduler.cancel(computing)
    with pytest.raises(RequestCancelledError, match="was cancelled before this one"):
        await behind
    waiting, middle = scene.send(1, 6), scene.request(1, 7)[0]
    scene.scheduler.submit(middle)
    last = scene.send(1, 8, end=True)
    scene.scheduler.cancel(middle)
    with pytest.raises(RequestCancelledError, match="was cancelled before this one"):
        await last
    scene.held.release.set()
    assert float((await waiting)["y"][0, 0]) == 9
    assert await scene.step(1, 1, end=True) == 10
    assert scene.scheduler.waiting == 0


def with_slots(slots: int) -> str:
    return f"max_batch_size: 4 sequence_batching {{ oldest {{ max_candidate_sequences: {slots} }} {STATE} }}"


@played(lambda root: sum_model(root, with_slots(1)))
async def test_a_sequence_waits_for_a_slot(scene: Scene) -> None:
    assert await scene.step(1, 3, start=True) == 3
    waiting = [scene.send(2, 5, start=True), scene.send(3, 7, start=True, end=True), scene.send(2, 6, end=True)]
    assert (scene.scheduler.running_sequences, scene.scheduler.backlog, scene.scheduler.waiting) == (1, 2, 3)
    assert await scene.step(1, 4, end=True) == 7
    assert [float((await one)["y"][0, 0]) for one in waiting] == [5, 7, 11]
    assert scene.held.batches == [[3], [4], [5], [6], [7]]


def test_the_backlog_is_bounded(tmp_path: Path) -> None:
    async def test(scene: Scene) -> None:
        await scene.step(1, 3, start=True)
        first = scene.send(2, 5, start=True)
        with pytest.raises(QueueFullError, match=r"the model's queue is full \(1 requests wait behind others"):
            scene.send(3, 7, start=True)
        await scene.step(1, 1, end=True)
        assert float((await first)["y"][0, 0]) == 5

    play(sum_model(tmp_path, with_slots(1)), test, Defaults(max_queue_size=1))


@played(lambda root: sum_model(root, with_slots(1)))
async def test_a_request_in_the_backlog_keeps_its_timeout(scene: Scene) -> None:
    await scene.step(1, 3, start=True)
    late = scene.send(2, 5, start=True, leave_by=time.monotonic() + 0.01)
    behind = scene.send(2, 5)
    with pytest.raises(DeadlineExceededError, match="longer than its timeout allows"):
        await asyncio.wait_for(late, WAIT_S)
    with pytest.raises(FailedPreconditionError):
        await behind
    assert (scene.scheduler.backlog, scene.scheduler.waiting) == (0, 0)
    with pytest.raises(InvalidArgumentError, match="is not running"):
        scene.send(2, 5)


@played(lambda root: sum_model(root, with_slots(1)))
async def test_requests_of_a_running_sequence_have_no_timeout(scene: Scene) -> None:
    await scene.step(1, 3, start=True)
    await scene.hold()
    past = time.monotonic()
    running = [scene.send(1, x, leave_by=past) for x in (4, 5)]
    late = scene.send(2, 5, start=True, leave_by=past)
    with pytest.raises(DeadlineExceededError):
        await asyncio.wait_for(late, WAIT_S)
    scene.held.release.set()
    assert [float((await one)["y"][0, 0]) for one in running] == [7, 12]


def test_an_idle_sequence_gives_its_slot_away(tmp_path: Path) -> None:
    idle = f"max_batch_size: 1 sequence_batching {{ max_sequence_idle_microseconds: 20000 {STATE} }}"

    async def test(scene: Scene) -> None:
        await scene.step(1, 3, start=True)
        assert await scene.step(2, 5, start=True) == 5  # waits until the first one is given up
        assert scene.scheduler.expired >= 1
        with pytest.raises(InvalidArgumentError, match=r"had no request for 0\.02 s"):
            scene.send(1, 4)

    play(sum_model(tmp_path, idle), test)


@played(lambda root: sum_model(root, with_slots(2)))
async def test_drain_finishes_accepted_requests_and_forgets_idle_sequences(scene: Scene) -> None:
    await scene.step(1, 3, start=True)
    await scene.step(2, 3, start=True)
    await scene.until_computing()
    await scene.hold()
    accepted = [scene.send(1, 4), scene.send(1, 5), scene.send(3, 6, start=True)]
    drained = asyncio.create_task(scene.scheduler.drain())
    await scene.until_computing()
    for key, start in ((4, True), (1, False)):
        with pytest.raises(UnavailableError, match="the model is shutting down"):
            scene.send(key, 1, start=start)
    scene.held.release.set()
    assert [float((await one)["y"][0, 0]) for one in accepted] == [7, 12, 6]
    await asyncio.wait_for(drained, WAIT_S)
    assert scene.scheduler.running_sequences == 0
