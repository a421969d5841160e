"""Requests for the pure parts of the queue, on a clock that tests set."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.batch_queue import Batch, BatchQueue


@dataclass(eq=False)
class Request:
    rows: int = 1
    bucket: Hashable = "a"
    deadline: float | None = None
    priority: int = 0
    patience: float | None = None
    leave_by: float | None = None
    size: int = 0
    arrived_ns: int = 0
    line: object = None

    @property
    def arrived(self) -> float:
        return self.arrived_ns / 1e9


def queue(**limits: object) -> BatchQueue[Request]:
    return BatchQueue(BatchLimits(**{"max_rows": 8, **limits}))  # type: ignore[arg-type]  # (keyword by keyword in the tests)


def offer(q: BatchQueue[Request], request: Request, now: float) -> Request:
    request.arrived_ns = round(now * 1e9)
    q.offer(request)
    return request


def take(q: BatchQueue[Request], now: float) -> Batch[Request]:
    batch = q.take(now)
    assert batch is not None
    return batch


def offer_all(q: BatchQueue[Request], requests: list[Request], now: float = 0.0) -> None:
    for request in requests:
        offer(q, request, now)
