"""Starts the batches of one model: decides when, on which copy, and whether on the event loop or on the copy's thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Hashable, Sequence
from typing import Final

from halfserve.serve.engine.dispatch.delivery import Delivery
from halfserve.serve.engine.dispatch.refusals import Refusals
from halfserve.serve.engine.dispatch.short_batches import SHORT_S, LoopOccupancy, ShortBatches, limit_s
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.queueing.admission_control import RunningBatch
from halfserve.serve.engine.queueing.batch_queue import Batch, BatchQueue
from halfserve.serve.engine.queueing.compute_slots import ComputeShare
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import LateRequests, Results, seconds_of

# Seconds for which a turn of the event loop computes short batches: TURN_S, or as long as the loop has handled other events
# since the last turn, up to LONGEST_TURN_S. Otherwise a flood of requests would leave no time to answer.
TURN_S = 0.002
LONGEST_TURN_S = 0.02
# Below this number, requests wait for one more turn of the loop, which costs less than an extra batch.
FEW: Final = 8
# An instance whose batches take at most this long gets its next batch while it computes: otherwise it would idle for the half
# millisecond from its thread to the loop and back. Short batches are excluded, because the loop computes them, and long ones,
# because a request would be computed before a more urgent one that arrives meanwhile.
AHEAD_S: Final = 0.05


class FreeInstances:
    """The copies of a model that can take a batch now, idle or busy.

    Attributes:
        idle: copies that compute nothing.
        latest_s: seconds that the latest batch on a thread took.
    """

    __slots__ = ("_busy", "_instances", "_may_go_ahead", "idle", "latest_s")

    def __init__(self, instances: Sequence[Instance], *, is_steady: bool = True) -> None:
        """Begin with all copies idle.

        `is_steady`: whether the model's batches take about equally long. Otherwise a batch behind a much longer one would wait
        for it while other copies compute later requests.
        """
        self.idle = list(instances)
        self._instances = instances
        self._may_go_ahead = is_steady or len(instances) == 1
        self.latest_s = math.inf
        self._busy: list[Instance] = []  # instances with exactly one batch

    @property
    def shares_batches(self) -> bool:
        """Whether requests of the model may share a batch, as far as its copies know."""
        return self._instances[0].shares_batches

    @property
    def can_go_ahead(self) -> bool:
        """Whether a busy instance should take the next batch, because all are busy."""
        return self._may_go_ahead and bool(self._busy) and not self.idle and SHORT_S < self.latest_s <= AHEAD_S

    def take_busy(self) -> Instance:
        """Remove and return an instance that computes one batch, so that it gets another."""
        return self._busy.pop()

    def sort_in(self, instance: Instance) -> None:
        """Update an instance that was taken, has finished a batch, or was loaded again."""
        for free in (self._busy, self.idle):
            if instance in free:
                free.remove(instance)
        if instance.takes_next:
            (self._busy if instance.batches else self.idle).append(instance)


class LoneRequest:
    """The first request of a turn of the event loop, which stays out of the queue while it is the only one.

    | state | event | what happens | next state |
    |---|---|---|---|
    | empty | a request that has nothing to wait for (`suits`) | schedule the end of the turn | held |
    | held | another request in this turn | both enter the queue, and share a batch | empty |
    | held | the turn ends, a copy is idle | compute it: at once if it is short, otherwise on the copy's thread | empty |
    | held | the turn ends, no copy is idle | it enters the queue | empty |
    | held | batches are dispatched for another reason, or no copy is up | it enters the queue | empty |
    | held | its client cancels it | drop it | empty |

    Attributes:
        request: the held request; None if it is empty.
        is_allowed: whether a single request has nothing to wait for: no delay, priorities, admission control or compute slots.
        latest_size: number of requests in the batch that started last; after a larger one, a request has company.
    """

    __slots__ = ("_free", "_max_rows", "_queue", "is_allowed", "latest_size", "request")

    def __init__(self, queue: BatchQueue, free: FreeInstances) -> None:
        limits = queue.limits
        self.request: InferRequest | None = None
        self.is_allowed = limits.levels == 1 and limits.max_delay_s == 0 and limits.latency_target_s is None
        self.latest_size = 1
        self._queue = queue
        self._free = free
        self._max_rows = limits.max_rows

    def suits(self, request: InferRequest) -> bool:
        """Return whether a request need not enter the queue, given that no batch is dispatched in this turn."""
        return (
            self.latest_size == 1
            and self.is_allowed
            and request.deadline is None
            and request.leave_by is None
            and bool(self._free.idle)
            and not self._queue.waiting.count
            and request.rows <= self._max_rows
        )

    def enter_queue(self) -> None:
        """Put the held request into the queue, which is empty."""
        request, self.request = self.request, None
        if request is not None:
            self._queue.offer(request)


class Dispatcher:
    """Hands the waiting requests of one model to its copies in batches, and has their results delivered.

    | what waits | next dispatch |
    |---|---|
    | requests, and a copy is idle | at the end of this turn of the loop; if they are fewer than FEW, one turn later |
    | requests, but a larger batch pays (`BatchQueue.next_due`) | when the first batch is due |
    | requests, but all copies are busy | when a batch ends; late requests get their errors meanwhile |
    | a full batch, and all copies are busy | at once, behind a running batch (`FreeInstances.can_go_ahead`) |
    | requests, but other models have the compute slots | when a slot is free (`ComputeShare.wake`) |
    | requests, but this turn has computed for long on the loop | next turn: answers go out first, and requests come in |
    | requests of a model that drains | at once, as large as they are |
    | requests of a model without a copy that is up | when a copy is up, unless all attempts to load one fail (`Refusals`) |

    Attributes:
        lone: the request that is not in the queue.
        soon: the dispatch in this turn of the loop or the next; None if there is none.
        occupancy: tracks the use of the event loop, shared with the other models.
        share: its share of the compute slots; None if batches need no slot.
        short: choice of the batches that run on the loop; None if none does.
    """

    def __init__(
        self,
        queue: BatchQueue,
        free: FreeInstances,
        delivery: Delivery,
        refusals: Refusals,
        short: ShortBatches | None,
        *,
        learns_rows: bool,
    ) -> None:
        """`learns_rows`: whether the queue learns from batches of one row before it has seen a larger one."""
        self.lone = LoneRequest(queue, free)
        self.soon: asyncio.Handle | None = None
        self.occupancy = LoopOccupancy()
        self.share: ComputeShare | None = None
        self.short = short
        self._queue = queue
        self._free = free
        self._delivery = delivery
        self._refusals = refusals
        self._learns_rows = learns_rows
        self._shares_batches = True
        self._loop: asyncio.AbstractEventLoop | None = None  # kept because get_running_loop() makes a system call
        self._away_since = 0.0  # when the last turn on the loop ended
        self._due: asyncio.TimerHandle | None = None  # dispatches when the oldest request has waited long enough

    def hold(self, request: InferRequest) -> None:
        """Compute a request that has nothing to wait for at the end of this turn, unless others come."""
        self.lone.request = request
        request.line = self.lone
        self.soon = self._running_loop().call_soon(self._run_lone)

    def queued(self, request: InferRequest) -> None:
        """Dispatch a queued request in this turn, if a copy can take it."""
        if self._free.idle or self._free.can_go_ahead:
            self.dispatch_soon()
        else:
            self._refusals.timer.watch(request.deadline, request.leave_by)

    def dispatch_soon(self) -> None:
        """Dispatch later in this turn of the loop, so that requests that arrive in one turn share a batch."""
        if self.soon is None:
            self.soon = self._running_loop().call_soon(self._gather)

    def dispatch(self) -> None:
        """Start the batches that may leave now."""
        self.lone.enter_queue()
        if self.soon is not None:
            self.soon.cancel()
            self.soon = None
        if self._due is not None:
            self._due.cancel()
            self._due = None
        hurry, short, free, now = self._refusals.drained is not None, self.short, self._free, time.monotonic()
        stop = now + min(max(TURN_S, now - self._away_since), LONGEST_TURN_S)
        alone = self.occupancy.is_alone(self, now)
        while free.idle and now < stop and (batch := self._next_batch(now, hurry=hurry)) is not None:
            if short is not None and short.suits(batch.bucket, batch.rows, _loop_limit_s(batch, alone=alone)):
                now = self._run_on_loop(batch, now, short)
            else:
                self._start(batch, now, free.idle.pop())
        if self._queue and self.share is None:
            self._go_ahead(now)
        self._away_since = now
        if self._queue and now >= stop:
            self.dispatch_soon()  # these answers go out first, and requests come in
        elif self._queue:
            self._dispatch_when_due(now)
        if hurry:
            self._refusals.notice_drained()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _run_lone(self) -> None:
        """Compute and answer the lone request: the way of most requests of a server that is not busy.

        What the queue does for a batch is left out, as there is nothing to wait for, and no request to share a batch with.
        """
        lone, short, idle = self.lone, self.short, self._free.idle
        request = lone.request
        if request is None or not idle:
            lone.enter_queue()
            self._gather()
            return
        lone.request = self.soon = request.line = None
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
        if self._refusals.drained is not None:
            self._refusals.notice_drained()

    def _gather(self) -> None:
        """Dispatch a single request or many at once; let a few wait one turn for more."""
        waiting = len(self._queue)
        if waiting >= FEW or waiting == self.lone.latest_size == 1:
            self.dispatch()
        else:
            self.soon = self._running_loop().call_soon(self.dispatch)

    def _next_batch(self, now: float, *, hurry: bool, begins: float | None = None) -> Batch | None:
        """Return a batch that may start; late requests get their errors. `begins`: see `BatchQueue.take`."""
        share = self.share
        if self._shares_batches and not self._free.shares_batches:
            self._shares_batches = False
            self._queue.part()
        while share is None or (self._queue.is_ready(now, hurry=hurry) and share.claim()):
            batch = self._queue.take(now, hurry=hurry, begins=begins)
            if batch is None:
                return None
            if batch.late:
                self._refusals.fail_late(batch.late, now)
            if batch.requests:
                self.lone.latest_size = len(batch.requests)
                return batch
            if share is not None:
                share.give_back(0.0)
        return None

    def _dispatch_when_due(self, now: float) -> None:
        """Schedule a dispatch for when the next batch is due; a busy instance or a slot wakes a model that waits for it."""
        if not self._free.idle or (self.share and self.share.waits):
            self._refusals.timer.watch(self._queue.waiting.soonest)
            return
        due = self._queue.next_due(now)
        if due is not None:  # a batch is due before its requests are late
            self._due = asyncio.get_running_loop().call_later(max(0.0, due - now), self.dispatch)

    def _go_ahead(self, now: float) -> None:
        """Give busy instances their next batch, if waiting would not make it larger."""
        while self._free.can_go_ahead:
            if not self._queue.has_full_batch(now):
                return
            self._refusals.timer.watch(self._queue.waiting.soonest)  # the running batch may take longer than usual
            admission = self._refusals.admission
            begins = now if admission is None else max(now, admission.free_s(now))
            batch = self._next_batch(now, hurry=False, begins=begins)
            if batch is None:
                return
            self._start(batch, begins, self._free.take_busy())

    def _start(self, batch: Batch, now: float, instance: Instance) -> None:
        self._refusals.running += 1
        running = self._account_start(batch, now)

        def finished(results: Results) -> None:
            self._free.sort_in(instance)
            if (seconds := seconds_of(results)) is not None:
                self._free.latest_s = seconds
                self._learn_rows(batch.bucket, batch.rows, seconds)
                if self.short is not None:
                    self.short.ran_on_thread(batch.bucket, batch.rows, seconds)
            if running is not None or self.share is not None:
                self._account_end(running, results, now)
            # The next batch is started first, so that a thread computes it while these answers are sent.
            self._delivery.add(*self._without_late(results, batch.rows))
            if self.share is None and (self._queue or self.lone.request is not None):
                self.dispatch()
            self._answer()
            self._refusals.running -= 1
            self._refusals.notice_drained()

        instance.run(batch.requests, finished)
        self._free.sort_in(instance)

    def _run_on_loop(self, batch: Batch, now: float, short: ShortBatches) -> float:
        """Compute and answer a batch; returns the time afterwards."""
        instance = self._free.idle.pop()  # taken first: `_answer` may queue requests again and dispatch them
        self._answer()  # batches are answered in the order in which they were computed
        running = self._account_start(batch, now)
        spent_s = time.thread_time()  # CPU time: preemption by other programs would hit a thread as well
        results = instance.run_on_loop(batch.requests)
        spent_s = time.thread_time() - spent_s
        if instance.is_up:
            self._free.idle.append(instance)
        clock_s = time.monotonic() - now
        short.ran_on_loop(batch.bucket, batch.rows, spent_s, clock_s)
        self._learn_rows(batch.bucket, batch.rows, clock_s)
        if running is not None:
            self._account_end(running, results, now)
        self._delivery.add(results, batch.rows)
        self._answer()
        return time.monotonic()

    def _without_late(self, results: Results, rows: int) -> tuple[Results, int]:
        """Return a batch's results and rows without the late requests, which get their errors."""
        first = results[0]
        if not isinstance(first, LateRequests):
            return results, rows
        self._refusals.fail_late(first.requests, time.monotonic())
        return results[1:], rows - sum(request.rows for request in first.requests)

    def _learn_rows(self, bucket: Hashable, rows: int, seconds: float) -> None:
        if rows > 1:
            self._learns_rows = True
        if self._learns_rows:
            self._queue.observe(bucket, rows, seconds)

    def _account_start(self, batch: Batch, now: float) -> RunningBatch | None:
        admission = self._refusals.admission
        return None if admission is None else admission.started(batch.bucket, batch.rows, now)

    def _account_end(self, running: RunningBatch | None, results: Results, started: float) -> None:
        now = time.monotonic()
        if self._refusals.admission is not None and running is not None:
            self._refusals.admission.finished(running, now, seconds_of(results))
        if self.share is not None:
            self.share.give_back(now - started, wants_more=bool(self._queue))

    def _answer(self) -> None:
        if self._delivery.deliver():
            self.dispatch()


def _loop_limit_s(batch: Batch, *, alone: bool) -> float:
    size = 0
    for request in batch.requests:
        size += request.size
    return limit_s(len(batch.requests), size, alone=alone)
