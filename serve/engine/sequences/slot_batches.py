"""Batches with a row per slot: the strategy `direct`, for models with a control input that marks the rows that are ready.

Each sequence has a slot, and its requests have the slot's row in every batch. Rows without a request belong to the next row
with a request: that request brings several rows, of which the last one is its own. A Python model gets a request for each row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping

import numpy as np

from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model import Scheduler
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.admission_control import late_error
from halfserve.serve.engine.queueing.deadline_timer import DeadlineTimer
from halfserve.serve.engine.queueing.waiting_requests import is_late
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence import slot_of
from halfserve.serve.engine.sequences.step_inputs import ControlTensors
from halfserve.serve.engine.tensors import Array, Tensors


class SlotInputs(Mapping[str, Array]):
    """The inputs of a request, preceded by rows that are not ready."""

    __slots__ = ("_given", "_missing", "_not_ready")

    def __init__(self, given: Tensors, missing: int, not_ready: Tensors) -> None:
        """`missing` rows come first, with these controls and otherwise a copy of the request's own row, which the model can
        take.
        """
        self._given = given
        self._missing = missing
        self._not_ready = not_ready

    @property
    def own(self) -> Tensors:
        """The inputs of the request alone."""
        return self._given

    def before(self) -> list[Tensors]:
        """Return the inputs of each row that is not ready."""
        return [{**self._given, **self._not_ready}] * self._missing

    def __getitem__(self, name: str) -> Array:
        own = self._given[name]
        other = self._not_ready.get(name, own)
        return np.concatenate([np.repeat(other, self._missing, axis=0), own])

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


class _Group:
    """The slots of one batch.

    Attributes:
        ready: requests for the next batch, by row.
        computing: requests of the batch that the batcher holds.
        token: part of its requests' bucket. It changes if a request of a batch was cancelled: otherwise the next batch could be
            joined with the rest of that one.
        soon: forms the next batch in this turn of the loop.
        due: forms it when its first request has waited long enough.
    """

    __slots__ = ("computing", "due", "ready", "soon", "token")

    def __init__(self) -> None:
        self.ready: dict[int, InferRequest] = {}
        self.computing: set[InferRequest] = set()
        self.token = object()
        self.soon: asyncio.Handle | None = None
        self.due: asyncio.TimerHandle | None = None


class SlotBatches:
    """Forms batches with a row per slot, and passes them to a model's batcher. Takes requests whose `done` is a Step."""

    def __init__(self, plan: SequencePlan, batcher: Scheduler, statistics: Statistics, *, rows: int) -> None:
        """`rows`: most rows in one batch."""
        self._plan = plan
        self._batcher = batcher
        self._statistics = statistics
        self._rows = rows
        self._groups: dict[int, _Group] = {}
        self._not_ready = ControlTensors(plan).not_ready()
        self._hurries = False
        self._timer = DeadlineTimer(self._drop_all_late)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their batch."""
        return sum(len(group.ready) for group in self._groups.values())

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return not self.waiting and self._batcher.is_idle

    def submit(self, request: InferRequest) -> None:
        """Take the request of a slot that has no other request here; its errors are reported to `done`."""
        number, row = self._place(request)
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group()
        group.ready[row] = request
        self._timer.watch(request.deadline)
        self._dispatch_soon(group)

    def cancel(self, request: InferRequest) -> None:
        """Drop a request, or its answer: the rows of a batch in progress keep their places."""
        request.cancelled = True
        number, row = self._place(request)
        group = self._groups[number]
        if group.ready.get(row) is request:
            del group.ready[row]
            self._statistics.failed(request.arrived_ns)
        elif request in group.computing:
            group.token = object()
            self.computed(request)

    def computed(self, request: InferRequest) -> None:
        """Note that a request has its result: the next batch may start once all requests of its batch have theirs."""
        group = self._groups[self._place(request)[0]]
        group.computing.discard(request)
        if group.ready:
            self._dispatch_soon(group)

    def hurry(self) -> None:
        """Wait for no more rows from now on."""
        self._hurries = True
        for group in self._groups.values():
            self._dispatch_soon(group)

    async def drain(self) -> None:
        """Stop, once every request has its answer."""
        await self._batcher.drain()
        self._timer.stop()

    def _place(self, request: InferRequest) -> tuple[int, int]:
        """Return the group of a request's slot, and the row in its batches."""
        if self._plan.lanes == 1:
            return divmod(slot_of(request), self._rows)
        row, group = divmod(slot_of(request), self._plan.lanes)  # the group is the lane (`SequenceLanes`)
        return group, row

    def _dispatch_soon(self, group: _Group) -> None:
        """Dispatch later in this turn of the loop, so that requests of one turn share a batch."""
        if group.soon is None and not group.computing:
            group.soon = asyncio.get_running_loop().call_soon(self._dispatch, group)

    def _dispatch(self, group: _Group) -> None:
        """Submit the ready requests of one shape to the batcher, or wait for more."""
        if group.due is not None:
            group.due.cancel()
        group.soon = group.due = None
        self._drop_late(group, time.monotonic())
        if group.computing or not group.ready:
            return
        wait_s = self._wait_s(group)
        if wait_s > 0:
            group.due = asyncio.get_running_loop().call_later(wait_s, self._dispatch, group)
            return
        shape = min(group.ready.values(), key=lambda request: request.arrived_ns).bucket
        rows = sorted(row for row, request in group.ready.items() if request.bucket == shape)
        before = -1
        for row in rows:
            request = group.ready.pop(row)
            request.rows = row - before
            if request.rows > 1:
                request.inputs = SlotInputs(request.inputs, request.rows - 1, self._not_ready)
            request.bucket = (group.token, shape)
            request.deadline = request.leave_by = request.patience = None  # the batch must not lose a row in the queue
            group.computing.add(request)
            try:
                self._batcher.submit(request)
            except InferenceError as error:
                group.computing.discard(request)
                request.finish(error)  # its rows go to the next request
            else:
                before = row

    def _wait_s(self, group: _Group) -> float:
        """Return the seconds that the next batch may still wait for more rows."""
        if self._hurries or len(group.ready) >= self._plan.enough_rows or not self._plan.max_delay_s:
            return 0.0
        first_s = min(request.arrived_ns for request in group.ready.values()) / 1e9
        bounds = [end for request in group.ready.values() for end in (request.deadline, request.leave_by) if end is not None]
        return 0.0 if bounds else first_s + self._plan.max_delay_s - time.monotonic()

    def _drop_all_late(self, now: float) -> None:
        for group in list(self._groups.values()):  # an answer may begin a sequence in a new group
            self._drop_late(group, now)
            for request in group.ready.values():
                self._timer.watch(request.deadline)

    def _drop_late(self, group: _Group, now: float) -> None:
        for row, request in list(group.ready.items()):
            if is_late(request, now, now):
                del group.ready[row]
                error = late_error(request, now)
                self._statistics.failed(request.arrived_ns, error)
                request.finish(error)
