from __future__ import annotations

import time

import pytest

from serve.engine.figures.statistics import BatchTimes, Statistics
from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.batch_queue import BatchQueue, FullError
from serve.engine.queueing.latency_model import CONFIDENT
from serve.engine.queueing.pace import Pace
from serve.engine.queueing.shedding import Shedding, full_error
from serve.engine.requests import InferRequest

BATCH_S = 0.1


def shedding(instances: int) -> Shedding:
    """Of a model whose batches are known to take BATCH_S."""
    limits = BatchLimits(max_rows=4)
    queue: BatchQueue[InferRequest] = BatchQueue(limits)
    queue.pace = Pace(limits)
    for _ in range(CONFIDENT):
        queue.pace.observe("a", 4, BATCH_S)
    return Shedding(queue, queue.pace, instances)


@pytest.mark.parametrize(
    ("instances", "begun", "free"),
    [
        (1, [], 0.05),
        (1, [0.0], 0.1),
        (1, [0.0, 0.1], 0.2),  # the second stands behind the first
        (2, [0.0], 0.05),
        (2, [0.0, 0.02], 0.1),
        (2, [0.0, 0.02, 0.1], 0.12),
        (2, [0.0, 0.02, 0.1, 0.12], 0.2),
    ],
)
def test_an_instance_is_free_when_all_that_it_was_given_is_done(instances: int, begun: list[float], free: float) -> None:
    shed = shedding(instances)
    for at in begun:
        shed.started("a", 4, at)
    assert shed.free_s(0.05) == pytest.approx(free)


@pytest.mark.parametrize(("asks_every_s", "is_taken"), [(0.5, False), (60.0, True)], ids=["hangs", "stood still"])
def test_a_batch_is_overdue_only_while_others_come(asks_every_s: float, *, is_taken: bool) -> None:
    shed = shedding(1)
    shed.started("a", 4, 100.0)
    now, refused = 100.0, False
    while now < 160.0:  # all have ten seconds
        now += asks_every_s
        arrived_ns = int(now * 1e9)
        refused = shed.admit(InferRequest({}, (), 1, "a", now + 10, print, arrived_ns=arrived_ns), now) is not None
    assert refused is not is_taken


def test_who_finds_the_queue_full_is_told_when_it_should_be_empty() -> None:
    statistics = Statistics()
    assert full_error(FullError("6 requests wait"), 6, statistics).retry_after_s == 0.001, "nothing is known yet"
    for _ in range(3):
        start = time.monotonic_ns()
        times = BatchTimes(started=start, assembled=start, computed=start + 2 * 10**9, split=start + 2 * 10**9)
        statistics.batch_done(times, [start], rows=4)
    assert full_error(FullError("6 requests wait"), 6, statistics).retry_after_s == pytest.approx(6 * 2 / 4)
