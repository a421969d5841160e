"""Fails the requests that cannot be answered: while no copy is up, at the end, in a full queue, and out of time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Final

from halfserve.serve.engine.dispatch.delivery import Delivery
from halfserve.serve.engine.errors import InferenceError, UnavailableError
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.admission_control import AdmissionControl, full_error, late_error
from halfserve.serve.engine.queueing.batch_queue import BatchQueue
from halfserve.serve.engine.queueing.deadline_timer import DeadlineTimer
from halfserve.serve.engine.queueing.pace import Pace
from halfserve.serve.engine.queueing.waiting_requests import FullError, is_late
from halfserve.serve.engine.requests import InferRequest

LOADING_S: Final = 0.1  # retry delay while a copy is being loaded again
SHUTTING_DOWN: Final = "the model is shutting down; send the request to another replica"


class Refusals:
    """The state in which a model takes or refuses requests, and the errors of refused requests.

    | state | event | what happens | next state |
    |---|---|---|---|
    | serving | a copy breaks | queued requests wait for it or for another copy | serving |
    | serving | a copy cannot be loaded again, and no other is up (`copies_changed`) | fail every queued request | down |
    | serving | a request does not fit the queue | drop late requests; refuse it if that is not enough (`make_room`) | serving |
    | serving | a request cannot meet its deadline, or the model's target | refuse it (`admit`) | serving |
    | serving | the deadline of a waiting request passes | fail it (`drop_late`) | serving |
    | down | a request | refuse it, and give the time of the next attempt to load a copy | down |
    | down | a copy is up | - | serving |
    | serving, down | `drain` | what waits leaves at once | draining |
    | draining | a request | refuse it | draining |
    | draining | no request waits, runs, or awaits a later answer (`notice_drained`) | - | drained |

    Attributes:
        is_closed: whether every request is refused: the model is down, draining or drained.
        drained: set once the model has drained; None unless it drains.
        running: number of batches on the threads of copies.
        admission: predicts late answers; None before the first request with a deadline or a latency target.
        timer: deadline timer of requests that wait while no copy or slot is free.
    """

    def __init__(self, instances: Sequence[Instance], queue: BatchQueue, delivery: Delivery, statistics: Statistics) -> None:
        self.is_closed = False
        self.drained: asyncio.Event | None = None
        self.running = 0
        self.admission: AdmissionControl | None = None
        self.timer = DeadlineTimer(self.drop_late)
        self._instances = instances
        self._queue = queue
        self._delivery = delivery
        self._statistics = statistics

    def refuse(self, request: InferRequest, error: InferenceError) -> InferenceError:
        """Count a request that does not enter the queue; returns its error."""
        self._statistics.failed(request.arrived_ns, error)
        return error

    def closed_error(self) -> UnavailableError:
        """Return the error of a request while the model `is_closed`."""
        return self._down_error() if self.drained is None else UnavailableError(SHUTTING_DOWN)

    def copies_changed(self) -> None:
        """Fail every queued request if no copy is up, because the time at which one will be up again is unknown."""
        is_down = not any(instance.is_up for instance in self._instances)
        self.is_closed = is_down or self.drained is not None
        if not is_down:
            return
        error, now = self._down_error(), time.monotonic()
        while (batch := self._queue.take(now, hurry=True)) is not None:
            self.fail_late(batch.late, now)
            for request in batch.requests:
                self._delivery.fail(request, error)
        self.notice_drained()

    def begin_drain(self) -> asyncio.Event:
        """Refuse requests from now on."""
        self.is_closed = True
        self.drained = asyncio.Event()
        return self.drained

    @property
    def is_idle(self) -> bool:
        """Whether no request waits in the queue, runs, or awaits a later answer."""
        return not self.running and not len(self._queue) and not self._delivery.awaited

    def notice_drained(self) -> None:
        """Set `drained` once the last request has its answer."""
        if self.drained is not None and self.is_idle:
            self.drained.set()

    def admit(self, request: InferRequest) -> None:
        """Record an arriving request, whose deadline the model's latency target may tighten.

        Raises:
            OverloadedError: the queue is too long for the model's latency target.
            DeadlineExceededError: the request cannot be answered before its client's deadline.
        """
        if self.admission is None:
            self._queue.pace = Pace(self._queue.limits)
            self.admission = AdmissionControl(self._queue, self._queue.pace, len(self._instances))
        refusal = self.admission.admit(request, time.monotonic())
        if refusal is not None:
            raise self.refuse(request, refusal)

    def make_room(self, request: InferRequest, full: FullError) -> None:
        """Queue a request after late ones have been dropped from a full queue.

        Raises:
            QueueFullError: the queue is still full.
        """
        now = time.monotonic()
        late = self._queue.waiting.take_late(now)
        try:
            self._queue.offer(request)
        except FullError:
            raise self.refuse(request, full_error(full, len(self._queue), self._statistics)) from None
        finally:
            self.fail_late(late, now)

    def drop_late(self, now: float) -> None:
        """Answer the requests whose time has run out while no instance was free, in the queue or behind a running batch."""
        self.fail_late(self._queue.waiting.take_late(now), now)
        for instance in self._instances:
            for request in instance.next_requests:
                if is_late(request, now, now):
                    request.finish(self._late_error(request, now))
                    request.cancelled = True  # it has its answer, and is counted once its instance reports it
                else:
                    self.timer.watch(request.deadline, request.leave_by)
        self.timer.watch(self._queue.waiting.soonest)
        self.notice_drained()

    def fail_late(self, late: list[InferRequest], now: float) -> None:
        """Give requests whose time has run out their errors."""
        for request in late:
            self._delivery.fail(request, self._late_error(request, now))

    def _late_error(self, request: InferRequest, now: float) -> InferenceError:
        return self.admission.too_late(request, now) if self.admission else late_error(request, now)

    def _down_error(self) -> UnavailableError:
        next_try_s = min(instance.recovery.next_try_s() for instance in self._instances)
        when = f"is in {math.ceil(next_try_s)} s" if next_try_s else "is under way"
        return UnavailableError(
            f"the model failed and cannot be loaded just now (the next attempt {when}); try again later, or on another replica",
            retry_after_s=next_try_s or LOADING_S,
        )
