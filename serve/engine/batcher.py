"""Queue a model's requests, run them in batches on its instances, and deliver the answers.

Everything here runs on the event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from halfserve.serve.engine.errors import InferenceError, UnavailableError
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.execution.delivery import Delivery
from halfserve.serve.engine.execution.free_instances import FreeInstances
from halfserve.serve.engine.execution.instance import Instance, LateRequests, Results, seconds_of
from halfserve.serve.engine.execution.short_batches import NOTHING_KNOWN, LoopOccupancy, ShortBatches, limit_s
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.padding.mixed_lengths import MixedLengths
from halfserve.serve.engine.queueing.admission_control import AdmissionControl, RunningBatch, full_error, late_error
from halfserve.serve.engine.queueing.batch_queue import Batch, BatchQueue
from halfserve.serve.engine.queueing.compute_slots import ComputeShare, ComputeSlots
from halfserve.serve.engine.queueing.deadline_timer import DeadlineTimer
from halfserve.serve.engine.queueing.pace import BatchLimits, Pace
from halfserve.serve.engine.queueing.waiting_requests import FullError, is_late
from halfserve.serve.engine.requests import InferRequest

# Seconds for which a turn of the event loop computes short batches: TURN_S, or as long as the loop has handled other events
# since the last turn, up to LONGEST_TURN_S. Otherwise a flood of requests would leave no time to answer.
TURN_S = 0.002
LONGEST_TURN_S = 0.02
# Below this number, requests wait for one more turn of the loop, which costs less than an extra batch.
FEW: Final = 8
LOADING_S: Final = 0.1  # retry delay while a copy is being loaded again
SHUTTING_DOWN: Final = "the model is shutting down; send the request to another replica"


class Batcher:
    """Queues requests and keeps every model instance busy while requests wait.

    Attributes:
        occupancy: tracks the use of the event loop, shared with the other models; set before the first request.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        limits: BatchLimits,
        statistics: Statistics,
        short_s: Mapping[int, float] = NOTHING_KNOWN,
        invariance: BatchInvariance | None = None,
        *,
        is_steady: bool = True,
        mixed: MixedLengths | None = None,
    ) -> None:
        self.occupancy = LoopOccupancy()
        self._limits = limits
        self._queue = BatchQueue(limits, None, mixed)
        self._invariance = invariance  # None once it has been found unsafe
        self._statistics = statistics
        self._instances = instances
        self._free = FreeInstances(instances, is_steady=is_steady)
        for instance in instances:
            instance.on_change = self._instance_changed
        self._delivery = Delivery(self._queue, statistics)
        self._delivery.on_late_answer = self._notice_drained
        self._loop: asyncio.AbstractEventLoop | None = None  # kept because get_running_loop() makes a system call
        self._running = 0
        self._away_since = 0.0  # when the last turn on the loop ended
        self._soon: asyncio.Handle | None = None  # dispatches in this turn of the loop, or the next
        self._latest_size = 1  # requests in the batch that started last
        self._due: asyncio.TimerHandle | None = None  # dispatches when the oldest request has waited long enough
        self._late_timer = DeadlineTimer(self._drop_late)  # for requests that wait while no instance or slot is free
        self._drained: asyncio.Event | None = None
        self._is_down = False  # whether no copy is up, and the latest attempt to load one has failed
        # Made by the first request with a deadline, or by `compete`.
        self._admission: AdmissionControl | None = None
        self._share: ComputeShare | None = None
        self._short = ShortBatches(short_s) if all(instance.may_run_on_loop for instance in instances) else None
        self._has_target = limits.latency_target_s is not None
        self._lone: InferRequest | None = None  # the only waiting request, which has not entered the queue
        # Whether a single request has nothing to wait for: neither a delay nor priorities.
        self._takes_lone = limits.levels == 1 and limits.max_delay_s == 0 and not self._has_target
        # Whether the queue learns from batches of one row: not before it has seen a larger one.
        self._learns_rows = mixed is not None

    @property
    def instances(self) -> Sequence[Instance]:
        """All copies of the model, in service or not."""
        return self._instances

    @property
    def waiting(self) -> int:
        return len(self._queue) + (self._lone is not None)

    def on_reschedule(self, listener: Callable[[InferRequest], None]) -> None:
        """Call `listener` with each request that its model wants once more. To be called before the first request."""
        self._delivery.on_reschedule = listener

    def compete(self, slots: ComputeSlots) -> None:
        """Run batches only in these slots, which other models share. To be called before the first request."""
        if self._share is None:
            self._short = None  # a batch on the loop asks for no slot
            self._share = slots.join(self._dispatch, self._limits.compute_weight)

    def submit(self, request: InferRequest) -> None:
        """Queue a request; its `done` is called later on this event loop, exactly once unless it is cancelled.

        Raises:
            UnavailableError: the batcher is draining, or all copies have failed and cannot be loaded again.
            QueueFullError: the queue has reached its bound, or (OverloadedError) is too long for the model's latency target.
            DeadlineExceededError: the request cannot be answered before its client's deadline.
        """
        if self._drained is not None or self._is_down:
            away = self._down_error() if self._drained is None else UnavailableError(SHUTTING_DOWN)
            self._statistics.failed(request.arrived_ns, away)
            raise away
        if self._soon is None and self._is_lone(request):
            self._lone, request.line = request, self
            self._soon = self._call_soon(self._run_lone)
            return
        if request.deadline is not None or self._has_target:
            self._admit(request)
        self._queue_lone()
        try:
            self._queue.offer(request)
        except FullError as full:
            self._make_room(request, full)
        if self._soon is None:
            if self._free.idle or self._free.can_go_ahead:
                self._dispatch_soon()
            else:
                self._late_timer.watch(request.deadline, request.leave_by)

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone: free its place if it still waits, otherwise discard its answer."""
        request.cancelled = True
        if request is self._lone:
            self._lone = request.line = None
        elif request.line is None or not self._queue.waiting.remove(request):
            return
        self._statistics.failed(request.arrived_ns)
        self._notice_drained()

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and end the worker threads."""
        if self._drained is None:
            self._drained = asyncio.Event()
            self._dispatch_soon()
            self._notice_drained()
        await self._drained.wait()
        if self._share is not None:
            self._share.leave()
            self._share = None  # breaks a reference cycle that would keep an unloaded model
        self._delivery.let_go()
        self._late_timer.stop()
        for instance in self._instances:
            instance.stop()

    def _is_lone(self, request: InferRequest) -> bool:
        """Return whether a request need not enter the queue: it is the first of this turn, and the latest batch had one too.

        The others of this turn put it into the queue, and share a batch with it.
        """
        return (
            self._latest_size == 1
            and self._takes_lone
            and self._share is None
            and self._admission is None
            and request.deadline is None
            and request.leave_by is None
            and bool(self._free.idle)
            and not self._queue.waiting.count
            and request.rows <= self._limits.max_rows
        )

    def _queue_lone(self) -> None:
        """Put the lone request into the queue, which is empty."""
        lone, self._lone = self._lone, None
        if lone is not None:
            self._queue.offer(lone)

    def _run_lone(self) -> None:
        """Compute and answer the lone request: the way of most requests of a server that is not busy.

        What the queue does for a batch is left out, as there is nothing to wait for, and no request to share a batch with.
        """
        request, short, idle = self._lone, self._short, self._free.idle
        if request is None or not idle:
            self._queue_lone()
            self._gather()
            return
        self._lone = self._soon = request.line = None
        now, bucket, rows = time.monotonic(), request.bucket, request.rows
        instance, alone = idle.pop(), self.occupancy.is_alone(self, now)
        if short is None or not short.suits(bucket, rows, limit_s(1, request.size, alone=alone)):
            self._start(Batch(bucket, [request], [], rows), now, instance)
            self._away_since = now
            return
        spent_s = time.thread_time()
        results = instance.run_on_loop([request])
        spent_s = time.thread_time() - spent_s
        if instance.is_up:
            idle.append(instance)
        self._away_since = ended = time.monotonic()
        short.ran_on_loop(bucket, rows, spent_s, ended - now)
        self._learn_rows(bucket, rows, ended - now)
        self._delivery.add(results, rows)
        self._answer()
        self._notice_drained()

    def _dispatch_soon(self) -> None:
        """Dispatch later in this turn of the loop, so that requests that arrive in one turn share a batch."""
        if self._soon is None:
            self._soon = self._call_soon(self._gather)

    def _gather(self) -> None:
        """Dispatch a single request or many at once; let a few wait one turn for more."""
        waiting = len(self._queue)
        if waiting >= FEW or waiting == self._latest_size == 1:
            self._dispatch()
        else:
            self._soon = self._call_soon(self._dispatch)

    def _call_soon(self, step: Callable[[], None]) -> asyncio.Handle:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.call_soon(step)

    def _dispatch(self) -> None:
        self._queue_lone()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._due is not None:
            self._due.cancel()
            self._due = None
        hurry, short, free, now = self._drained is not None, self._short, self._free, time.monotonic()
        stop = now + min(max(TURN_S, now - self._away_since), LONGEST_TURN_S)
        alone = self.occupancy.is_alone(self, now)
        while free.idle and now < stop and (batch := self._next_batch(now, hurry=hurry)) is not None:
            if short is not None and short.suits(batch.bucket, batch.rows, _loop_limit_s(batch, alone=alone)):
                now = self._run_on_loop(batch, now, short)
            else:
                self._start(batch, now, free.idle.pop())
        if self._queue and self._share is None:
            self._go_ahead(now)
        self._away_since = now
        if self._queue and now >= stop:
            self._dispatch_soon()  # these answers go out first, and requests come in
        elif self._queue:
            self._dispatch_when_due(now)
        if hurry:
            self._notice_drained()

    def _next_batch(self, now: float, *, hurry: bool, begins: float | None = None) -> Batch | None:
        """Return a batch that may start; late requests get their errors. `begins`: see `BatchQueue.take`."""
        share = self._share
        if self._invariance is not None and not self._invariance.is_safe:
            self._invariance = None
            self._queue.part()
        while share is None or (self._queue.is_ready(now, hurry=hurry) and share.claim()):
            batch = self._queue.take(now, hurry=hurry, begins=begins)
            if batch is None:
                return None
            if batch.late:
                self._fail_late(batch.late, now)
            if batch.requests:
                self._latest_size = len(batch.requests)
                return batch
            if share is not None:
                share.give_back(0.0)
        return None

    def _dispatch_when_due(self, now: float) -> None:
        """Schedule a dispatch for when the next batch is due; a busy instance or a slot wakes a model that waits for it."""
        if not self._free.idle or (self._share and self._share.waits):
            self._late_timer.watch(self._queue.waiting.soonest)
            return
        due = self._queue.next_due(now)
        if due is not None:  # a batch is due before its requests are late
            self._due = asyncio.get_running_loop().call_later(max(0.0, due - now), self._dispatch)

    def _go_ahead(self, now: float) -> None:
        """Give busy instances their next batch, if waiting would not make it larger."""
        while self._free.can_go_ahead:
            if not self._queue.has_full_batch(now):
                return
            self._late_timer.watch(self._queue.waiting.soonest)  # the running batch may take longer than usual
            begins = now if self._admission is None else max(now, self._admission.free_s(now))
            batch = self._next_batch(now, hurry=False, begins=begins)
            if batch is None:
                return
            self._start(batch, begins, self._free.take_busy())

    def _start(self, batch: Batch, now: float, instance: Instance) -> None:
        self._running += 1
        running = None if self._admission is None else self._admission.started(batch.bucket, batch.rows, now)

        def finished(results: Results) -> None:
            self._free.sort_in(instance)
            if (seconds := seconds_of(results)) is not None:
                self._free.latest_s = seconds
                self._learn_rows(batch.bucket, batch.rows, seconds)
                if self._short is not None:
                    self._short.ran_on_thread(batch.bucket, batch.rows, seconds)
            if running is not None or self._share is not None:
                self._account(running, results, now)
            # The next batch is started first, so that a thread computes it while these answers are sent.
            self._delivery.add(*self._without_late(results, batch.rows))
            if self.waiting and self._share is None:
                self._dispatch()
            self._answer()
            self._running -= 1
            self._notice_drained()

        instance.run(batch.requests, finished)
        self._free.sort_in(instance)

    def _without_late(self, results: Results, rows: int) -> tuple[Results, int]:
        """Return a batch's results and rows without the late requests, which get their errors."""
        first = results[0]
        if not isinstance(first, LateRequests):
            return results, rows
        self._fail_late(first.requests, time.monotonic())
        return results[1:], rows - sum(request.rows for request in first.requests)

    def _run_on_loop(self, batch: Batch, now: float, short: ShortBatches) -> float:
        """Compute and answer a batch; returns the time afterwards."""
        instance = self._free.idle.pop()  # taken first: `_answer` may queue requests again and dispatch them
        self._answer()  # batches are answered in the order in which they were computed
        running = None if self._admission is None else self._admission.started(batch.bucket, batch.rows, now)
        spent_s = time.thread_time()  # CPU time: preemption by other programs would hit a thread as well
        results = instance.run_on_loop(batch.requests)
        spent_s = time.thread_time() - spent_s
        if instance.is_up:
            self._free.idle.append(instance)
        clock_s = time.monotonic() - now
        short.ran_on_loop(batch.bucket, batch.rows, spent_s, clock_s)
        self._learn_rows(batch.bucket, batch.rows, clock_s)
        if running is not None:
            self._account(running, results, now)
        self._delivery.add(results, batch.rows)
        self._answer()
        return time.monotonic()

    def _learn_rows(self, bucket: Hashable, rows: int, seconds: float) -> None:
        if rows > 1:
            self._learns_rows = True
        if self._learns_rows:
            self._queue.observe(bucket, rows, seconds)

    def _account(self, running: RunningBatch | None, results: Results, started: float) -> None:
        now = time.monotonic()
        if self._admission is not None and running is not None:
            self._admission.finished(running, now, seconds_of(results))
        if self._share is not None:
            self._share.give_back(now - started, wants_more=bool(self._queue))

    def _answer(self) -> None:
        if self._delivery.deliver():
            self._dispatch()

    def _instance_changed(self, instance: Instance) -> None:
        self._is_down = not any(other.is_up for other in self._instances)
        if instance.is_up:
            self._free.sort_in(instance)
            self._dispatch()
        elif self._is_down:
            self._fail_all_waiting()

    def _down_error(self) -> UnavailableError:
        next_try_s = min(instance.next_try_s() for instance in self._instances)
        when = f"is in {math.ceil(next_try_s)} s" if next_try_s else "is under way"
        return UnavailableError(
            f"the model failed and cannot be loaded just now (the next attempt {when}); try again later, or on another replica",
            retry_after_s=next_try_s or LOADING_S,
        )

    def _fail_all_waiting(self) -> None:
        """Fail every queued request, because the time at which a copy will be up again is unknown."""
        error, now = self._down_error(), time.monotonic()
        self._queue_lone()
        while (batch := self._queue.take(now, hurry=True)) is not None:
            self._fail_late(batch.late, now)
            for request in batch.requests:
                self._delivery.fail(request, error)
        self._notice_drained()

    def _admit(self, request: InferRequest) -> None:
        if self._admission is None:
            self._queue.pace = Pace(self._limits)
            self._admission = AdmissionControl(self._queue, self._queue.pace, len(self._instances))
        refusal = self._admission.admit(request, time.monotonic())
        if refusal is not None:
            self._statistics.failed(request.arrived_ns, refusal)
            raise refusal

    def _make_room(self, request: InferRequest, full: FullError) -> None:
        """Drop late requests from a full queue."""
        now = time.monotonic()
        late = self._queue.waiting.take_late(now)
        try:
            self._queue.offer(request)
        except FullError:
            refusal = full_error(full, len(self._queue), self._statistics)
            self._statistics.failed(request.arrived_ns, refusal)
            raise refusal from None
        finally:
            self._fail_late(late, now)

    def _drop_late(self, now: float) -> None:
        """Answer the requests whose time has run out while no instance was free, in the queue or behind a running batch."""
        self._fail_late(self._queue.waiting.take_late(now), now)
        for instance in self._instances:
            for request in instance.next_requests:
                if is_late(request, now, now):
                    request.finish(self._late_error(request, now))
                    request.cancelled = True  # it has its answer, and is counted once its instance reports it
                else:
                    self._late_timer.watch(request.deadline, request.leave_by)
        self._late_timer.watch(self._queue.waiting.soonest)
        self._notice_drained()

    def _fail_late(self, late: list[InferRequest], now: float) -> None:
        for request in late:
            self._delivery.fail(request, self._late_error(request, now))

    def _late_error(self, request: InferRequest, now: float) -> InferenceError:
        return self._admission.too_late(request, now) if self._admission else late_error(request, now)

    def _notice_drained(self) -> None:
        if self._drained is not None and not self._running and not self.waiting and not self._delivery.awaited:
            self._drained.set()


def _loop_limit_s(batch: Batch, *, alone: bool) -> float:
    size = 0
    for request in batch.requests:
        size += request.size
    return limit_s(len(batch.requests), size, alone=alone)
