"""Queue a model's requests, run them in batches on its instances, and deliver the answers.

Everything here runs on the event loop, so nothing here needs a lock. The parts, each with its states:

- `Refusals`: whether the model takes requests, and the errors of requests that are refused.
- `LoneRequest`: a request that is computed at once, without the queue.
- `Dispatcher`: when which batch starts, and where it is computed.
- `Instance` and its `Recovery`: one copy of the model, its thread, and what happens when it breaks.
- `Delivery`: answers of computed batches, and requests that are computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from halfserve.serve.engine.dispatch.delivery import Delivery
from halfserve.serve.engine.dispatch.dispatcher import Dispatcher, FreeInstances
from halfserve.serve.engine.dispatch.refusals import Refusals
from halfserve.serve.engine.dispatch.short_batches import NOTHING_KNOWN, LoopOccupancy, ShortBatches
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.padding.mixed_lengths import MixedLengths
from halfserve.serve.engine.queueing.batch_queue import BatchQueue
from halfserve.serve.engine.queueing.compute_slots import ComputeSlots
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest


class Batcher:
    """Queues requests and keeps every model instance busy while requests wait."""

    def __init__(
        self,
        instances: Sequence[Instance],
        limits: BatchLimits,
        statistics: Statistics,
        short_s: Mapping[int, float] = NOTHING_KNOWN,
        *,
        is_steady: bool = True,
        mixed: MixedLengths | None = None,
    ) -> None:
        self._instances = instances
        self._limits = limits
        self._queue = BatchQueue(limits, None, mixed)
        self._free = FreeInstances(instances, is_steady=is_steady)
        self._delivery = Delivery(self._queue, statistics)
        self._statistics = statistics
        self._refusals = Refusals(instances, self._queue, self._delivery, statistics)
        short = ShortBatches(short_s) if all(instance.may_run_on_loop for instance in instances) else None
        learns_rows = mixed is not None
        self._dispatcher = Dispatcher(self._queue, self._free, self._delivery, self._refusals, short, learns_rows=learns_rows)
        self._has_target = limits.latency_target_s is not None
        self._delivery.on_late_answer = self._refusals.notice_drained
        for instance in instances:
            instance.recovery.on_change = partial(self._instance_changed, instance)

    @property
    def instances(self) -> Sequence[Instance]:
        """All copies of the model, in service or not."""
        return self._instances

    @property
    def waiting(self) -> int:
        """Number of requests that no copy computes yet."""
        return len(self._queue) + (self._dispatcher.lone.request is not None)

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return self._refusals.is_idle and self._dispatcher.lone.request is None

    def on_reschedule(self, listener: Callable[[InferRequest], None]) -> None:
        """Call `listener` with each request that its model wants once more. To be called before the first request."""
        self._delivery.on_reschedule = listener

    def share_loop(self, occupancy: LoopOccupancy) -> None:
        """Run short batches on an event loop that other models use too. To be called before the first request."""
        self._dispatcher.occupancy = occupancy

    def compete(self, slots: ComputeSlots) -> None:
        """Run batches only in these slots, which other models share. To be called before the first request."""
        dispatcher = self._dispatcher
        if dispatcher.share is None:
            dispatcher.short = None  # a batch on the loop asks for no slot
            dispatcher.lone.is_allowed = False
            dispatcher.share = slots.join(dispatcher.dispatch, self._limits.compute_weight)

    def submit(self, request: InferRequest) -> None:
        """Queue a request; its `done` is called later on this event loop, exactly once unless it is cancelled.

        Raises:
            UnavailableError: the batcher is draining, or all copies have failed and cannot be loaded again.
            QueueFullError: the queue has reached its bound, or (OverloadedError) is too long for the model's latency target.
            DeadlineExceededError: the request cannot be answered before its client's deadline.
        """
        refusals, dispatcher = self._refusals, self._dispatcher
        if refusals.is_closed:
            raise refusals.refuse(request, refusals.closed_error())
        lone = dispatcher.lone
        if dispatcher.soon is None and lone.suits(request):
            dispatcher.hold(request)
            return
        if request.deadline is not None or self._has_target:
            lone.is_allowed = False  # because admission control records every request
            refusals.admit(request)
        lone.enter_queue()
        try:
            self._queue.offer(request)
        except FullError as full:
            refusals.make_room(request, full)
        if dispatcher.soon is None:
            dispatcher.queued(request)

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone: free its place if it still waits, otherwise discard its answer."""
        request.cancelled = True
        lone = self._dispatcher.lone
        if request is lone.request:
            lone.request = request.line = None
        elif request.line is None or not self._queue.waiting.remove(request):
            return
        self._statistics.failed(request.arrived_ns)
        self._refusals.notice_drained()

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and end the worker threads."""
        refusals, dispatcher = self._refusals, self._dispatcher
        drained = refusals.drained
        if drained is None:
            drained = refusals.begin_drain()
            dispatcher.lone.enter_queue()
            dispatcher.dispatch_soon()
            refusals.notice_drained()
        await drained.wait()
        if dispatcher.share is not None:
            dispatcher.share.leave()
            dispatcher.share = None  # breaks a reference cycle that would keep an unloaded model
        self._delivery.let_go()
        refusals.timer.stop()
        for instance in self._instances:
            instance.stop()

    def _instance_changed(self, instance: Instance) -> None:
        """Use a copy that is up again; without any, fail what waits."""
        self._dispatcher.lone.enter_queue()
        self._refusals.copies_changed()
        if instance.is_up:
            self._free.sort_in(instance)
            self._dispatcher.dispatch()
