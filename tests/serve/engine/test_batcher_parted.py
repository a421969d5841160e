"""Requests that may not be joined: each is a batch of its own, and waits for no other."""

from __future__ import annotations

import asyncio
from itertools import chain

import numpy as np
import pytest

from serve.engine.batcher import Batcher
from serve.engine.figures.statistics import Statistics
from serve.engine.instances.instance import Instance
from serve.engine.instances.supervision import Supervision
from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.joining import Joining
from serve.engine.queueing.latency_model import CONFIDENT
from serve.engine.queueing.pace import Pace
from serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend
from tests.serve.engine.scene import Answers, run
from tests.serve.engine.waiting import Request, offer, queue, take


class Finding(HeldBackend):
    """Answers with a row more than it gets."""

    def run(self, inputs: Tensors) -> Tensors:
        y = super().run(inputs)["y"]
        return {"y": y.repeat(2, axis=0)[: len(y) + 1]}


def batcher_of(*backends: HeldBackend, joining: Joining, max_delay_s: float = 0.0) -> Batcher:
    how = Supervision(label="m/1", joining=joining)
    instances = [Instance(backend, number, how) for number, backend in enumerate(backends)]
    return Batcher(instances, BatchLimits(max_rows=8, max_delay_s=max_delay_s), Statistics(), joining=joining)


def test_every_copy_takes_one() -> None:
    async def scene(answers: Answers) -> None:
        backends = [Finding(held=True), Finding(held=True)]
        joining = Joining("m/1")
        joining.is_safe = False
        batcher = batcher_of(*backends, joining=joining)
        for value in (1, 2):
            batcher.submit(answers.request(value))
        for backend in backends:
            assert await asyncio.to_thread(backend.entered.wait, 5), "one copy has taken both"
        for backend in backends:
            backend.release.set()
        await answers.all(2)
        assert sorted(chain.from_iterable(backend.batches for backend in backends)) == [[1], [2]]
        await batcher.drain()

    run(scene)


def test_nobody_waits_for_company_once_that_is_known() -> None:
    async def scene(answers: Answers) -> None:
        backend, joining = Finding(), Joining("m/1")
        batcher = batcher_of(backend, joining=joining, max_delay_s=3600.0)
        batcher.submit(answers.request(1))
        joining.look({"y": np.zeros((2, 1))}, 1)
        batcher.submit(answers.request(2))
        await answers.all(2)
        assert backend.batches == [[1], [2]]
        await batcher.drain()

    run(scene)


@pytest.mark.parametrize("learned", [False, True])
def test_a_parted_queue_gives_out_one_request_at_once(learned: bool) -> None:
    q = queue(max_delay_s=3600.0, preferred_rows=(6,))
    if learned:
        q.pace = Pace(q.limits)
        for _ in range(CONFIDENT):
            q.pace.observe("a", 1, 0.1)
    first, second = offer(q, Request(rows=3), 0.0), offer(q, Request(), 0.0)
    assert q.take(0.0) is None
    q.part()
    assert q.has_full_batch(0.0)
    assert take(q, 0.0).requests == [first]
    assert take(q, 0.0).requests == [second]
    offer(q, Request(rows=8), 0.0)  # as large as it might be before
    assert take(q, 0.0).rows == 8
