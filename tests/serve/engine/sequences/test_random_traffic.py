"""Random requests, failures and cancellations of many sequences: each answer is the sum of the answered requests before it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from halfserve.serve.engine.errors import (
    BackendError,
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    RequestCancelledError,
)
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array
from tests.serve.engine.sequences.scene import STATE, WAIT_S, Scene, play, sum_model

KEYS = 8
FAILS = 1000.0  # the model has no such value


@dataclass
class Sent:
    request: InferRequest
    answer: asyncio.Future[dict[str, Array]]
    x: float
    starts: bool
    cancelled: bool = False


async def send_at_random(scene: Scene, random: random.Random, count: int) -> dict[int, list[Sent]]:
    sent: dict[int, list[Sent]] = {key: [] for key in range(1, KEYS + 1)}
    for _ in range(count):
        key = random.randint(1, KEYS)
        starts, ends = random.random() < 0.2, random.random() < 0.2
        x = FAILS if random.random() < 0.1 else float(random.randint(0, 9))
        request, answer = scene.request(key, x, start=starts, end=ends)
        one = Sent(request, answer, x, starts)
        try:
            scene.scheduler.submit(request)
        except InvalidArgumentError:
            assert not starts
        else:
            sent[key].append(one)
        if random.random() < 0.2 and sent[key]:
            gone = random.choice(sent[key][-4:])
            gone.cancelled = gone.cancelled or not gone.answer.done()
            scene.scheduler.cancel(gone.request)
        if random.random() < 0.3:
            await asyncio.sleep(0)
        if random.random() < 0.02:
            asked = [one.answer for ones in sent.values() for one in ones[-1:] if not one.cancelled]
            await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), WAIT_S)
    return sent


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_answers_are_right_and_nothing_is_left(tmp_path: Path, seed: int, slots: int) -> None:
    strategy = f"oldest {{ max_candidate_sequences: {slots} }}"
    config = f"max_batch_size: 4 sequence_batching {{ max_sequence_idle_microseconds: 20000 {strategy} {STATE} }}"

    async def test(scene: Scene) -> None:
        sent = await send_at_random(scene, random.Random(seed), 300)  # noqa: S311  (no secret)
        asked = [one for ones in sent.values() for one in ones if not one.cancelled]
        await asyncio.wait_for(asyncio.gather(*(one.answer for one in asked), return_exceptions=True), WAIT_S)
        right = 0
        for ones in sent.values():
            total = np.nan
            for one in ones:
                if one.cancelled:
                    assert not one.answer.done()
                elif isinstance(error := one.answer.exception(), InferenceError):
                    behind = (FailedPreconditionError, RequestCancelledError)
                    assert isinstance(error, behind if one.x != FAILS else (BackendError, *behind))
                else:
                    total = one.x if one.starts else total + one.x
                    assert one.answer.result()["y"].tolist() == [[total]]
                    right += 1
        assert right >= 10
        assert scene.scheduler.waiting == 0
        await asyncio.wait_for(scene.scheduler.drain(), WAIT_S)
        assert (scene.scheduler.running_sequences, scene.scheduler.backlog) == (0, 0)

    play(sum_model(tmp_path, config), test)
