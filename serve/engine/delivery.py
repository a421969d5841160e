"""What becomes of the requests of a computed batch: an answer, an error, or another try where their copy broke."""

from __future__ import annotations

from collections import deque

from serve.engine.batches.batch import Answered, Failed
from serve.engine.errors import InferenceError
from serve.engine.figures.statistics import Statistics
from serve.engine.instances.supervision import Lost, Results
from serve.engine.queueing.batch_queue import BatchQueue, FullError
from serve.engine.requests import InferRequest


class Delivery:
    """Gives one model's requests their answers, in the order in which their batches were computed."""

    def __init__(self, queue: BatchQueue[InferRequest], statistics: Statistics) -> None:
        """Nothing is to be delivered yet.

        Args:
            queue: takes the requests that are to be tried once more.
            statistics: are told of every answer and error.
        """
        self._queue = queue
        self._statistics = statistics
        self._computed: deque[tuple[Results, int]] = deque()  # batches with their rows

    def add(self, results: Results, rows: int) -> None:
        """What became of a batch of `rows` rows, for `deliver`."""
        self._computed.append((results, rows))

    def deliver(self) -> bool:
        """Answer all that was added; whether requests have been queued once more."""
        again = False
        while self._computed:
            results, rows = self._computed.popleft()
            for result in results:
                if isinstance(result, Answered):
                    self._answer(result, rows if len(results) == 1 else sum(request.rows for request in result.requests))
                elif isinstance(result, Failed):
                    self.fail(result.request, result.error)
                elif isinstance(result, Lost):
                    again |= self._replay(result)
        return again

    def fail(self, request: InferRequest, error: InferenceError) -> None:
        """Give a request an error."""
        self._statistics.failed(request.arrived_ns, error)
        request.finish(error)

    def _answer(self, computed: Answered, rows: int) -> None:
        requests = computed.requests
        arrivals_ns = [request.arrived_ns for request in requests if not request.cancelled]
        self._statistics.batch_done(computed.times, arrivals_ns, rows)
        for request, answer in zip(requests, computed.answers, strict=True):
            if request.cancelled:
                self._statistics.failed(request.arrived_ns)
            else:
                request.finish(answer)

    def _replay(self, lost: Lost) -> bool:
        """Queue what was lost with its copy once more; what was so before fails, as it may be what breaks copies."""
        queued = False
        for request in lost.requests:
            if request.cancelled or request.replayed:
                self.fail(request, lost.error)
                continue
            if not lost.untouched:
                request.bucket = object()  # one of them may be what breaks copies, and is not to take the others along again
            try:
                self._queue.offer(request)
            except FullError:
                self.fail(request, lost.error)
            else:
                request.replayed = True
                queued = True
        return queued
