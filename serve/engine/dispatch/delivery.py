"""Gives requests the answers of computed batches, and queues unanswered requests again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.admission_control import full_error
from halfserve.serve.engine.queueing.batch_queue import BatchQueue
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import (
    Answered,
    Failed,
    LaterAnswer,
    LostRequests,
    PendingAnswers,
    Rescheduled,
    Results,
)
from halfserve.serve.engine.tensors import Tensors


class Delivery:
    """Gives one model's requests their answers, in the order in which their batches were computed.

    Attributes:
        awaited: number of requests whose answers come after the end of their batch.
        on_late_answer: called after each of these answers.
        on_reschedule: called with each request that the model wants once more, before it is queued.
    """

    def __init__(self, queue: BatchQueue, statistics: Statistics) -> None:
        self.awaited = 0
        self.on_late_answer: Callable[[], None] = _nothing
        self.on_reschedule: Callable[[InferRequest], None] = _nothing_with
        self._queue = queue
        self._statistics = statistics
        self._computed: deque[tuple[Results, int]] = deque()  # results of computed batches, with their rows

    def add(self, results: Results, rows: int) -> None:
        self._computed.append((results, rows))

    def deliver(self) -> bool:
        """Answer all added batches; returns whether requests have been queued again."""
        again = False
        while self._computed:
            results, rows = self._computed.popleft()
            for result in results:
                if isinstance(result, Answered):
                    self._answer(result, rows if len(results) == 1 else sum(request.rows for request in result.requests))
                elif isinstance(result, Failed):
                    self.fail(result.request, result.error)
                elif isinstance(result, LostRequests):
                    again |= self._replay(result)
                elif isinstance(result, PendingAnswers):
                    self._await(result)
                elif isinstance(result, Rescheduled):
                    again |= self._reschedule(result)
        return again

    def let_go(self) -> None:
        """Drop the listeners after the last answer, which breaks a reference cycle that would keep an unloaded model."""
        self.on_late_answer, self.on_reschedule = _nothing, _nothing_with

    def fail(self, request: InferRequest, error: InferenceError) -> None:
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

    def _await(self, pending: PendingAnswers) -> None:
        """Answer requests once their model has given its answers."""

        def answer_later(request: InferRequest, later: LaterAnswer) -> None:
            def answered(result: Tensors | InferenceError) -> None:
                self.awaited -= 1
                if isinstance(result, InferenceError):
                    self.fail(request, result)
                else:
                    self._answer(Answered([request], [result], pending.times), request.rows)
                self.on_late_answer()

            self.awaited += 1
            later.then(answered)

        for request, later in pending.later:
            answer_later(request, later)

    def _reschedule(self, rescheduled: Rescheduled) -> bool:
        """Queue requests once more, because their model wants them again."""
        queued = False
        for request in rescheduled.requests:
            if request.cancelled:
                self._statistics.failed(request.arrived_ns)
                continue
            request.leave_by = request.patience = None  # the limits held for the first stay in the queue
            self.on_reschedule(request)
            try:
                self._queue.offer(request)
            except FullError as full:
                self.fail(request, full_error(full, len(self._queue), self._statistics))
            else:
                queued = True
        return queued

    def _replay(self, lost: LostRequests) -> bool:
        """Queue requests of a lost copy once more; a request that is lost twice fails, because it may be the one that breaks
        copies.
        """
        queued = False
        for request in lost.requests:
            if request.cancelled or request.replayed:
                self.fail(request, lost.error)
                continue
            if lost.fault is not None:
                request.bucket = object()  # each is computed alone, because one of them may break copies
            try:
                self._queue.offer(request)
            except FullError:
                self.fail(request, lost.error)
            else:
                request.replayed = True
                queued = True
        return queued


def _nothing() -> None:
    """Do nothing, until a listener is set."""


def _nothing_with(_: InferRequest) -> None:
    """Do nothing, until a listener is set."""
