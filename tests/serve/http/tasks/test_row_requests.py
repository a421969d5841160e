"""The rows of one request are queued and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from starlette.requests import Request

from halfserve.serve.http.request_body import RequestMemory
from halfserve.serve.http.request_parser import CLIENT_GONE
from halfserve.serve.http.tasks.row_requests import ROWS_A_STEP, RowRequests
from halfserve.serve.protocol.inference import InferenceEntry
from halfserve.serve.security.memory_budget import MemoryBudget

ROWS, AT_ONCE = 200, 64


class Maker:
    def message(self, row: int) -> bytes:
        return b"%d" % row


class Entry:
    """Takes rows, and answers all that it has at once.

    Attributes:
        taken: number of rows in each iteration of the event loop, or in two.
    """

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._replies: list[tuple[bytes, Callable[[bytes], None]]] = []
        self._may_count_on = False

    def infer(self, data: bytes, time_left_s: float | None, reply: Callable[[bytes], None]) -> Callable[[], None]:
        del time_left_s
        if not self._may_count_on:
            self._may_count_on = True
            self.taken.append(0)
            asyncio.get_running_loop().call_soon(self._end_step)
        self.taken[-1] += 1
        self._replies.append((data, reply))
        if len(self._replies) == AT_ONCE or sum(self.taken) == ROWS:
            asyncio.get_running_loop().call_soon(self._answer)
        return lambda: None

    def _end_step(self) -> None:
        self._may_count_on = False

    def _answer(self) -> None:
        replies, self._replies = self._replies, []
        for data, reply in replies:
            reply(b"answer " + data)


def test_a_request_of_many_rows_queues_a_few_in_each_step() -> None:
    entry = Entry()

    async def run() -> list[bytes]:
        gone = asyncio.get_running_loop().create_future()
        request = Request({"type": "http", "headers": [], "client": ("127.0.0.1", 1), CLIENT_GONE: gone})
        memory = RequestMemory(MemoryBudget(2**30))
        rows = RowRequests(cast("InferenceEntry", entry), Maker(), range(ROWS), AT_ONCE, memory, None)
        return await asyncio.wait_for(rows.gather(request), 60)

    assert asyncio.run(run()) == [b"answer %d" % row for row in range(ROWS)]
    assert sum(entry.taken) == ROWS
    assert max(entry.taken) <= 2 * ROWS_A_STEP  # the next step may run before the count of the last one ends
