"""Requests of different lengths at the real batcher: cancelled, late, failing, and computed together."""

from __future__ import annotations

import asyncio

import numpy as np

from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.errors import BackendError, DeadlineExceededError, InferenceError
from halfserve.serve.engine.execution.runners import make_instance
from halfserve.serve.engine.execution.tensor_runner import Supervision
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.padding.mixed_lengths import BatchCosts, MixedLengths
from halfserve.serve.engine.padding.padding import Padding, PaddingSettings
from halfserve.serve.engine.padding.padding_rule import parse_padding_rule
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fakes import HeldBackend

# On such a device all lengths are worth sharing a batch.
DEVICE = [(rows, length, 0.01 + 1e-6 * rows * length) for rows in (1, 8) for length in (4, 16, 64)]


class Held:
    """A batcher whose one instance computes nothing until it is released; it computes x + 1."""

    def __init__(self) -> None:
        self.backend = HeldBackend(held=True)
        padding = Padding(PaddingSettings(rule=parse_padding_rule("x[1]=7 -> y[1]")), ["x"])
        instance = make_instance(self.backend, 0, Supervision(label="m/1", padding=padding))
        mixed = MixedLengths(padding, BatchCosts(DEVICE))
        self.batcher = Batcher([instance], BatchLimits(max_rows=8), Statistics(), mixed=mixed)
        self.results: dict[int, Tensors | InferenceError] = {}  # by the length of the request

    def submit(self, length: int, value: float = 1.0, leave_by: float | None = None) -> InferRequest:
        x = np.full((1, length), value, np.float32)

        def done(result: Tensors | InferenceError) -> None:
            assert length not in self.results
            self.results[length] = result

        request = InferRequest({"x": x}, ("y",), 1, (length,), None, done, leave_by=leave_by)
        self.batcher.submit(request)
        return request

    async def occupy(self) -> None:
        """Let one request reach the instance, so that the following ones wait."""
        self.submit(1)
        assert await asyncio.to_thread(self.backend.entered.wait, 20)

    async def finish(self) -> None:
        self.backend.release.set()
        await self.batcher.drain()

    def values(self, length: int) -> list[list[float]]:
        result = self.results[length]
        assert not isinstance(result, InferenceError), result
        values: list[list[float]] = result["y"].tolist()
        return values


async def test_a_cancelled_request_leaves_the_others_their_batch() -> None:
    held = Held()
    await held.occupy()
    held.submit(2)
    gone = held.submit(5)
    held.submit(3)
    held.batcher.cancel(gone)
    await held.finish()
    assert sorted(held.results) == [1, 2, 3]
    assert [len(batch) for batch in held.backend.batches] == [1, 2]
    assert (held.values(2), held.values(3)) == ([[2, 2]], [[2, 2, 2]])


async def test_a_request_that_is_cancelled_while_it_is_computed_gets_no_answer() -> None:
    held = Held()
    gone = held.submit(4)
    held.submit(2)
    assert await asyncio.to_thread(held.backend.entered.wait, 20)
    held.batcher.cancel(gone)
    await held.finish()
    assert list(held.results) == [2]
    assert held.values(2) == [[2, 2]]
    assert held.backend.batches == [[1, 1]]


async def test_a_late_request_is_not_computed_with_the_others() -> None:
    held = Held()
    await held.occupy()
    held.submit(3, leave_by=0.0)
    held.submit(2)
    await held.finish()
    assert isinstance(held.results[3], DeadlineExceededError)
    assert held.values(2) == [[2, 2]]
    assert held.backend.batches == [[1], [1]]


async def test_a_request_that_fails_is_found_among_other_lengths() -> None:
    held = Held()
    await held.occupy()
    held.submit(2)
    held.submit(3, value=-1.0)
    held.submit(4)
    await held.finish()
    assert isinstance(held.results[3], BackendError)
    assert (held.values(2), held.values(4)) == ([[2, 2]], [[2, 2, 2, 2]])
