"""Between the event loop, where requests arrive, and the worker threads, where batches run.

Everything but `run_batch` happens on the event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from serve.engine.backend import Backend
from serve.engine.batch import Answered, Failed, run_batch
from serve.engine.batch_queue import Batch, BatchLimits, BatchQueue, FullError
from serve.engine.errors import DeadlineExceededError, InferenceError, QueueFullError, UnavailableError
from serve.engine.requests import InferRequest
from serve.engine.statistics import Statistics
from serve.engine.worker import Worker


class Batcher:
    """Queues requests and keeps every backend instance busy while requests wait."""

    def __init__(self, backends: Sequence[Backend], limits: BatchLimits, statistics: Statistics) -> None:
        self._queue: BatchQueue[InferRequest] = BatchQueue(limits)
        self._statistics = statistics
        self._idle = [(backend, Worker(f"instance-{index}")) for index, backend in enumerate(backends)]
        self._workers = [worker for _, worker in self._idle]
        self._running = 0
        self._soon: asyncio.Handle | None = None  # dispatch in this turn of the loop
        self._due: asyncio.TimerHandle | None = None  # dispatch when the oldest request has waited long enough
        self._drained: asyncio.Event | None = None

    @property
    def waiting(self) -> int:
        """Requests in the queue, those being computed not counted."""
        return len(self._queue)

    def submit(self, request: InferRequest) -> None:
        """Queue a request; its `done` is called later on this event loop, exactly once unless it is cancelled.

        Raises:
            UnavailableError: the batcher is draining.
            QueueFullError: the queue has reached its bound.
        """
        if self._drained is not None:
            raise UnavailableError("the model is shutting down; send the request to another replica")
        try:
            self._queue.offer(request, time.monotonic())
        except FullError as full:
            raise QueueFullError(
                f"the model's queue is full ({full.bound} requests wait); retry with back-off",
                retry_after_s=self._retry_after_s(),
            ) from None
        self._dispatch_soon()

    def cancel(self, request: InferRequest) -> None:
        """The client has gone: free the request's place if it still waits, and drop its answer otherwise."""
        request.cancelled = True
        if self._queue.remove(request):
            self._statistics.failed(request.arrived_ns)
            self._notice_drained()

    async def drain(self) -> None:
        """Take nothing more, finish everything that was taken, end the worker threads."""
        if self._drained is None:
            self._drained = asyncio.Event()
            self._dispatch_soon()
            self._notice_drained()
        await self._drained.wait()
        for worker in self._workers:
            worker.stop()

    def _dispatch_soon(self) -> None:
        """Not at once: requests that arrive in the same turn of the loop share the batch."""
        if self._soon is None and self._idle:
            self._soon = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        for handle in (self._soon, self._due):
            if handle is not None:
                handle.cancel()
        self._soon = self._due = None
        loop = asyncio.get_running_loop()
        while self._idle and (batch := self._take()) is not None:
            for request in batch.expired:
                self._fail(
                    request,
                    DeadlineExceededError("the deadline passed while the request waited in the queue; it was not computed"),
                )
            if batch.requests:
                self._start(loop, batch.requests)
        due = self._queue.next_due()
        if self._idle and due is not None:
            self._due = loop.call_later(max(0.0, due - time.monotonic()), self._dispatch)
        self._notice_drained()

    def _take(self) -> Batch[InferRequest] | None:
        return self._queue.take(time.monotonic(), hurry=self._drained is not None)

    def _start(self, loop: asyncio.AbstractEventLoop, requests: list[InferRequest]) -> None:
        backend, worker = self._idle.pop()
        self._running += 1

        def finished(results: list[Answered | Failed]) -> None:
            self._running -= 1
            self._idle.append((backend, worker))
            for result in results:
                self._deliver(result)
            self._dispatch_soon()

        worker.submit(_work, loop, backend, requests, finished)

    def _deliver(self, result: Answered | Failed) -> None:
        if isinstance(result, Failed):
            self._fail(result.request, result.error)
            return
        self._statistics.batch_done(result.times, [r.arrived_ns for r in result.requests], sum(r.rows for r in result.requests))
        for request, answer in zip(result.requests, result.answers, strict=True):
            request.finish(answer)

    def _fail(self, request: InferRequest, error: InferenceError) -> None:
        self._statistics.failed(request.arrived_ns)
        request.finish(error)

    def _retry_after_s(self) -> float:
        """How long the queue takes to empty at the pace so far."""
        computing_ns = sum(size.compute_infer.ns for size in self._statistics.by_batch_size.values())
        return max(0.001, computing_ns / 1e9 / max(1, self._statistics.rows) * len(self._queue))

    def _notice_drained(self) -> None:
        if self._drained is not None and not self._running and not self._queue:
            self._drained.set()


def _work(
    loop: asyncio.AbstractEventLoop,
    backend: Backend,
    requests: list[InferRequest],
    finished: Callable[[list[Answered | Failed]], None],
) -> None:
    results = run_batch(backend, requests)
    with contextlib.suppress(RuntimeError):  # the loop has been closed: the server gave up waiting for this batch
        loop.call_soon_threadsafe(finished, results)
