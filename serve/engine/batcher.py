"""Between the event loop, where requests arrive, and the worker threads, where batches run.

Everything here happens on the event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from serve.engine.delivery import Delivery
from serve.engine.errors import UnavailableError
from serve.engine.figures.statistics import Statistics
from serve.engine.instances.company import Company
from serve.engine.instances.free_instances import FreeInstances
from serve.engine.instances.instance import Instance
from serve.engine.instances.short_batches import NOTHING_KNOWN, ShortBatches, limit_s
from serve.engine.instances.supervision import Late, Results, seconds_of
from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.batch_queue import Batch, BatchQueue, FullError
from serve.engine.queueing.compute_slots import ComputeSlots, Share
from serve.engine.queueing.joining import Joining
from serve.engine.queueing.pace import Pace
from serve.engine.queueing.shedding import Running, Shedding, full_error, late_error
from serve.engine.requests import InferRequest

# A turn of the event loop computes short batches for so many seconds, or for as long as requests came in before, if that took
# longer: else a flood would leave no time to answer.
TURN_S, LONGEST_TURN_S = 0.002, 0.02
# Fewer requests than these wait for one more look at the sockets, which costs less than starting another batch for them.
FEW = 8
LOADING_S = 0.1  # until a copy that is being loaded anew may be there
SHUTTING_DOWN = "the model is shutting down; send the request to another replica"


class Batcher:
    """Queues requests and keeps every backend instance busy while requests wait.

    Attributes:
        company: of the models that the event loop serves, to be set before the first request.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        limits: BatchLimits,
        statistics: Statistics,
        short_s: Mapping[int, float] = NOTHING_KNOWN,
        joining: Joining | None = None,
        *,
        is_steady: bool = True,
    ) -> None:
        self.company = Company()
        self._limits = limits
        self._queue: BatchQueue[InferRequest] = BatchQueue(limits)
        self._joining = joining  # None once nothing can change any more
        self._statistics = statistics
        self._instances = instances
        self._free = FreeInstances(instances, is_steady=is_steady)
        for instance in instances:
            instance.on_change = self._instance_changed
        self._delivery = Delivery(self._queue, statistics)
        self._running = 0
        self._away_since = 0.0  # when the last turn on the loop ended
        self._soon: asyncio.Handle | None = None  # dispatch in this turn of the loop, or the next
        self._latest_size = 1  # requests in the batch that started last
        self._due: asyncio.TimerHandle | None = None  # dispatch when the oldest request has waited long enough
        self._drained: asyncio.Event | None = None
        self._is_down = False  # no copy is up, and the latest try to load one anew has failed
        # Nothing until they are needed: foresight by the first request with a deadline, a share where there are slots.
        self._shedding: Shedding | None = None
        self._share: Share | None = None
        # Small models need no thread.
        self._short = ShortBatches(short_s) if all(instance.may_run_on_loop for instance in instances) else None
        self._has_target = limits.latency_target_s is not None

    @property
    def instances(self) -> Sequence[Instance]:
        """The copies of the model, those that are taken out included."""
        return self._instances

    @property
    def waiting(self) -> int:
        """Requests in the queue, those being computed not counted."""
        return len(self._queue)

    def compete(self, slots: ComputeSlots) -> None:
        """Run batches only in these slots, which other models use too. To be called before the first request."""
        if self._share is None:
            self._short = None  # a batch on the loop asks for no slot
            self._share = slots.join(self._dispatch, self._limits.compute_weight)

    def submit(self, request: InferRequest) -> None:
        """Queue a request; its `done` is called later on this event loop, exactly once unless it is cancelled.

        Raises:
            UnavailableError: the batcher is draining, or all copies are broken and cannot be loaded anew.
            QueueFullError: the queue has reached its bound, or (OverloadedError) is too long for the model's latency target.
            DeadlineExceededError: the request cannot be answered before its client's deadline.
        """
        if self._drained is not None or self._is_down:
            away = self._down_error() if self._drained is None else UnavailableError(SHUTTING_DOWN)
            self._statistics.failed(request.arrived_ns, away)
            raise away
        if request.deadline is not None or self._has_target:
            self._foresee(request)
        try:
            self._queue.offer(request)
        except FullError as full:
            self._make_room(request, full)
        if self._soon is None and (self._free.idle or self._free.can_go_ahead):
            self._dispatch_soon()

    def cancel(self, request: InferRequest) -> None:
        """The client has gone: free the request's place if it still waits, and drop its answer otherwise."""
        request.cancelled = True
        if request.line is not None and self._queue.remove(request):
            self._statistics.failed(request.arrived_ns)
            self._notice_drained()

    async def drain(self) -> None:
        """Take nothing more, finish everything that was taken, end the worker threads."""
        if self._drained is None:
            self._drained = asyncio.Event()
            self._dispatch_soon()
            self._notice_drained()
        await self._drained.wait()
        if self._share is not None:
            self._share.leave()
            self._share = None  # it knows this batcher: a circle would keep an unloaded model
        for instance in self._instances:
            instance.stop()

    # From the queue to the instances

    def _dispatch_soon(self) -> None:
        """Not at once: requests that arrive in the same turn of the loop share the batch."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._gather)

    def _gather(self) -> None:
        """Let a few wait for what comes in the meantime; one that is alone, as the one before it was, starts at once."""
        waiting = len(self._queue)
        if waiting >= FEW or waiting == self._latest_size == 1:
            self._dispatch()
        else:
            self._soon = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._due is not None:
            self._due.cancel()
            self._due = None
        hurry, short, free, now = self._drained is not None, self._short, self._free, time.monotonic()
        stop = now + min(max(TURN_S, now - self._away_since), LONGEST_TURN_S)
        alone = self.company.is_alone(self, now)
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
            self._look_again(now)
        if hurry:
            self._notice_drained()

    def _next_batch(self, now: float, *, hurry: bool, begins: float | None = None) -> Batch[InferRequest] | None:
        """A batch that may start; those that turn out to be too late get their answers. For `begins` see BatchQueue.take."""
        share = self._share
        if self._joining is not None and not self._joining.is_safe:
            self._joining = None
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

    def _look_again(self, now: float) -> None:
        """Dispatch when the next batch is due; a model whose turn in the slots has not come is woken then."""
        due = self._queue.next_due(now)
        if self._free.idle and due is not None and not (self._share and self._share.waits):
            self._due = asyncio.get_running_loop().call_later(max(0.0, due - now), self._dispatch)

    def _go_ahead(self, now: float) -> None:
        """Have instances that compute a batch do the next one as well, where waiting would not make it any larger."""
        while self._free.can_go_ahead:
            if not self._queue.has_full_batch(now):
                return
            begins = now if self._shedding is None else max(now, self._shedding.free_s(now))
            batch = self._next_batch(now, hurry=False, begins=begins)
            if batch is None:
                return
            self._start(batch, begins, self._free.take_busy())

    def _start(self, batch: Batch[InferRequest], now: float, instance: Instance) -> None:
        self._running += 1
        running = None if self._shedding is None else self._shedding.started(batch.bucket, batch.rows, now)

        def finished(results: Results) -> None:
            self._free.sort_in(instance)
            if (seconds := seconds_of(results)) is not None:
                self._free.latest_s = seconds
                if self._short is not None:
                    self._short.ran_on_thread(batch.bucket, batch.rows, seconds)
            if running is not None or self._share is not None:
                self._account(running, results, now)
            # First the next batch: a thread computes it while these answers are put on the wire.
            self._delivery.add(*self._without_late(results, batch.rows))
            if self._queue and self._share is None:
                self._dispatch()
            self._answer()
            self._running -= 1
            self._notice_drained()

        instance.run(batch.requests, finished)
        self._free.sort_in(instance)

    def _without_late(self, results: Results, rows: int) -> tuple[Results, int]:
        """What became of a batch of so many rows, without those that were too late; these get their answers."""
        first = results[0]
        if not isinstance(first, Late):
            return results, rows
        self._fail_late(first.requests, time.monotonic())
        return results[1:], rows - sum(request.rows for request in first.requests)

    def _run_on_loop(self, batch: Batch[InferRequest], now: float, short: ShortBatches) -> float:
        """Compute and answer a batch; returns the time then."""
        instance = self._free.idle.pop()  # now: requests that were lost with a copy may be queued anew, and take what is idle
        self._answer()  # in order: what was computed before is answered before
        running = None if self._shedding is None else self._shedding.started(batch.bucket, batch.rows, now)
        spent_s = time.thread_time()  # time in which other programs had the core would be lost on a thread as well
        results = instance.run_on_loop(batch.requests)
        spent_s = time.thread_time() - spent_s
        if instance.is_up:
            self._free.idle.append(instance)
        short.ran_on_loop(batch.bucket, batch.rows, spent_s, time.monotonic() - now)
        if running is not None:
            self._account(running, results, now)
        self._delivery.add(results, batch.rows)
        self._answer()
        return time.monotonic()

    def _account(self, running: Running | None, results: Results, started: float) -> None:
        now = time.monotonic()
        if self._shedding is not None and running is not None:
            self._shedding.finished(running, now, seconds_of(results))
        if self._share is not None:
            self._share.give_back(now - started, wants_more=bool(self._queue))

    def _answer(self) -> None:
        """Deliver what was computed."""
        if self._delivery.deliver():
            self._dispatch()

    # Copies that break and come back

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
            f"the model failed and cannot be loaded anew just now (the next try {when}); "
            "try again later, or on another replica",
            retry_after_s=next_try_s or LOADING_S,
        )

    def _fail_all_waiting(self) -> None:
        """Nobody is to wait for who knows how long."""
        error, now = self._down_error(), time.monotonic()
        while (batch := self._queue.take(now, hurry=True)) is not None:
            self._fail_late(batch.late, now)
            for request in batch.requests:
                self._delivery.fail(request, error)
        self._notice_drained()

    # What cannot be answered

    def _foresee(self, request: InferRequest) -> None:
        """Refuse a request that could not be answered in time."""
        if self._shedding is None:
            self._queue.pace = Pace(self._limits)
            self._shedding = Shedding(self._queue, self._queue.pace, len(self._instances))
        refusal = self._shedding.admit(request, time.monotonic())
        if refusal is not None:
            self._statistics.failed(request.arrived_ns, refusal)
            raise refusal

    def _make_room(self, request: InferRequest, full: FullError) -> None:
        """The queue is full: those that wait in vain make room."""
        now = time.monotonic()
        late = self._queue.take_late(now)
        try:
            self._queue.offer(request)
        except FullError:
            refusal = full_error(full, len(self._queue), self._statistics)
            self._statistics.failed(request.arrived_ns, refusal)
            raise refusal from None
        finally:
            self._fail_late(late, now)

    def _fail_late(self, late: list[InferRequest], now: float) -> None:
        for request in late:
            self._delivery.fail(request, self._shedding.too_late(request, now) if self._shedding else late_error(request, now))

    def _notice_drained(self) -> None:
        if self._drained is not None and not self._running and not self._queue:
            self._drained.set()


def _loop_limit_s(batch: Batch[InferRequest], *, alone: bool) -> float:
    """See `limit_s`."""
    return limit_s(len(batch.requests), sum([request.size for request in batch.requests]), alone=alone)
