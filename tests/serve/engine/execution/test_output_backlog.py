"""Batches with large outputs wait while too many of them are to be serialized."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from halfserve.serve.engine.execution.output_backlog import BACKLOG, LARGE_BYTES, MOST_BYTES, OutputBacklog
from halfserve.serve.engine.tensors import Tensors
from tests.serve.engine.fragile_copies import WAIT_S, Fragile, Scene


class Wide(Fragile):
    """Gives outputs of a number of bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.waited: list[bool] = []  # for each batch, whether a thread has waited for the backlog before
        self._size = size

    def run(self, inputs: Tensors) -> Tensors:
        self.waited.append(BACKLOG._is_awaited)
        super().run(inputs)
        return {"y": np.zeros((len(inputs["x"]), self._size), np.uint8)}


@pytest.mark.parametrize(("size", "expected"), [(LARGE_BYTES + 1, [False, True, True]), (LARGE_BYTES, [False] * 3)])
async def test_the_batch_after_one_with_large_outputs_waits(size: int, expected: list[bool]) -> None:
    backend = Wide(size)
    scene = Scene([backend], None)
    BACKLOG.remove(0)  # an earlier test's thread may have waited last
    BACKLOG.add(MOST_BYTES + 1)
    try:
        for number in range(3):
            await scene.submit(number)
        await scene.batcher.drain()
    finally:
        BACKLOG.remove(MOST_BYTES + 1)
    assert backend.waited == expected


def test_waiting_ends_when_enough_is_serialized() -> None:
    backlog, left = OutputBacklog(most_bytes=10), list[int]()
    for size in (8, 6):
        backlog.add(size)

    def wait() -> None:
        backlog.wait()
        left.append(backlog.size)

    waiting = threading.Thread(target=wait)
    waiting.start()
    backlog.remove(6)
    waiting.join(WAIT_S)
    assert left in ([8], [14])  # 14 after LONGEST_WAIT_S, on a machine that stood still
    assert backlog.size == 8
    backlog.wait()
