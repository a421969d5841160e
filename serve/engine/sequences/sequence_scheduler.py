"""Passes a sequence's requests to the batcher one after the other, so that requests of many sequences share a batch.

A failed request leaves the sequence's states unchanged, and the requests that already wait behind it fail with it, because they
would otherwise be computed on states that lack a step. If a request is cancelled, the requests behind it are cancelled too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Final

from halfserve.serve.engine.batcher import SHUTTING_DOWN
from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.errors import (
    BackendError,
    FailedPreconditionError,
    InferenceError,
    InvalidArgumentError,
    RequestCancelledError,
    UnavailableError,
)
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.admission_control import full_error, late_error
from halfserve.serve.engine.queueing.batch_queue import FullError
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.queueing.waiting_line import is_late
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.scheduler import Scheduler
from halfserve.serve.engine.sequences.sequence import Sequence, SequenceId, Step
from halfserve.serve.engine.sequences.sequence_table import SequenceTable
from halfserve.serve.engine.sequences.slot_batches import SlotBatches
from halfserve.serve.engine.sequences.step_inputs import ControlTensors, StepInputs, sequence_of
from halfserve.serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)

SWEEP_S: Final = 0.02  # least seconds between two searches for requests that wait too long
WARN_S: Final = 10.0  # least seconds between two warnings of one model


class SequenceScheduler:
    """Takes the requests of a model with sequences. Lives on the event loop.

    Attributes:
        successor: scheduler of a newer version, which forwards requests of running sequences to this one; None without one.
        predecessor: scheduler of the previous version, while it still runs sequences.
        expired: number of sequences that were ended because they were idle for too long.
    """

    def __init__(self, label: str, plan: SequencePlan, batcher: Scheduler, limits: BatchLimits, statistics: Statistics) -> None:
        """`label`: the model's name; `batcher`: takes one request of a sequence at a time."""
        self.successor: SequenceScheduler | None = None
        self.predecessor: SequenceScheduler | None = None
        self.expired = 0
        self._label = label
        self._plan = plan
        self._batcher = batcher
        self._limits = limits
        self._statistics = statistics
        self._controls = ControlTensors(plan)
        self._state_inputs = tuple(state.input.name for state in plan.states)
        self._state_outputs = tuple(state.output.name for state in plan.states)
        self._initial = tuple(state.initial for state in plan.states)
        # States of varying sizes may not fit into one batch.
        self._sizes_vary = any(-1 in state.input.shape[1 if plan.batched else 0 :] for state in plan.states)
        self._table = SequenceTable(plan.slots)
        self._waiting = self._waiting_bytes = 0  # number and bytes of requests that wait for their turn or a slot
        self._is_filling = False
        self._idle_check: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None  # checks for requests that wait too long
        self._sweep_at = math.inf
        self._swept_at = self._warned_at = -math.inf
        self._drained: asyncio.Event | None = None

    @property
    def plan(self) -> SequencePlan:
        return self._plan

    @property
    def running_sequences(self) -> int:
        """Number of sequences with a slot."""
        return self._table.running

    @property
    def backlog(self) -> int:
        """Number of sequences that wait for a slot."""
        return self._table.backlog

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot, or for the request before them."""
        return self._waiting

    @property
    def pending(self) -> int:
        """Number of requests that wait, including those with a row in a batch that is being formed."""
        return self._waiting + (self._batcher.waiting if isinstance(self._batcher, SlotBatches) else 0)

    def continues(self, key: SequenceId) -> bool:
        """Return whether the sequence runs here and takes further requests."""
        sequence = self._table.find(key)
        return sequence is not None and sequence.is_open

    def submit(self, request: InferRequest) -> None:
        """Take a request of a sequence; see `Scheduler.submit`.

        Raises:
            InvalidArgumentError: its parameters are wrong, or it continues a sequence that does not run.
            UnavailableError: the model is being unloaded and starts no sequence.
            QueueFullError: the limit of waiting requests is reached.
            InferenceError: the batcher refuses the request.
        """
        try:
            key, starts, ends = sequence_of(request, self._label)
            sequence = self._table.find(key)
            before = self._before(key, sequence) if not starts else None
            if before is None:
                self._require_taken(request, key, sequence, starts=starts)
        except InferenceError as error:
            self._statistics.failed(request.arrived_ns, error)
            raise
        if before is not None:
            before.submit(request)
            return
        goes_on = self._table.has_free_slot if sequence is None else sequence.is_idle
        if sequence is None:
            sequence = self._table.add(key)
        elif starts and sequence.is_open:
            self._warn_of_restart(key)
        step = Step(self, request, sequence, starts=starts, ends=ends)
        if not goes_on:
            self._wait(step)
            return
        self._table.idle.pop(sequence, None)
        try:
            self._run(step)
        except InferenceError:
            step.close()
            self._settle(sequence)
            raise

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone: the sequence's states stay as before it, and the requests behind it fail."""
        step = request.done
        if isinstance(step, Step) and not step.is_over:
            step.scheduler.gone(step)  # the step may belong to the predecessor

    async def drain(self) -> None:
        """Refuse new sequences and finish the accepted requests; with a successor, finish the running sequences as well."""
        if self._drained is None:
            self._drained = asyncio.Event()
            if self.predecessor is not None:
                self.predecessor.let_go()
            if isinstance(self._batcher, SlotBatches):
                self._batcher.hurry()
            if self.successor is None:
                self._end_idle()
            self._notice_drained()
        await self._drained.wait()
        if self.successor is not None:
            self.successor.predecessor = None
        self.let_go()
        for timer in (self._idle_check, self._sweep):
            if timer is not None:
                timer.cancel()
        await self._batcher.drain()

    def let_go(self) -> None:
        """Wait for no further requests of running sequences."""
        self.successor = None
        if self._drained is not None:
            self._end_idle()
            self._notice_drained()

    def finished(self, step: Step, result: Tensors | InferenceError) -> None:
        """Take the result of a request from the batcher."""
        sequence = step.sequence
        sequence.running = None
        if isinstance(self._batcher, SlotBatches):
            self._batcher.computed(step.request)
        if not isinstance(result, InferenceError):
            try:
                sequence.states = self._states(result)
            except InferenceError as error:
                self._statistics.failed(step.request.arrived_ns, error)
                result = error
        if isinstance(result, InferenceError):
            behind = self._undo(sequence, step)
            step.answer(result)
            self._fail_behind(behind)
        else:
            sequence.has_begun = not step.ends
            step.answer(result)
        self._advance(sequence)

    def gone(self, step: Step) -> None:
        """Drop a request whose client has gone."""
        request, sequence = step.request, step.sequence
        request.cancelled = True
        if sequence.running is step:
            self._batcher.cancel(request)
            sequence.running = None
            behind = self._undo(sequence, step)
        else:
            behind = self._cut(sequence, step)
            self._statistics.failed(request.arrived_ns)
        step.close()
        self._fail_behind(behind, is_cancelled=True)
        self._settle(sequence)

    def _before(self, key: SequenceId, sequence: Sequence | None) -> SequenceScheduler | None:
        """Return the predecessor, if a request continues a sequence that runs there; None if it runs here.

        Raises:
            InvalidArgumentError: the sequence runs nowhere.
        """
        if sequence is not None and sequence.is_open:
            return None
        if self.predecessor is not None and self.predecessor.continues(key):
            return self.predecessor
        raise InvalidArgumentError(
            f"sequence {key!r} of model {self._label!r} is not running: it was not started, has ended, or had no request for "
            f"{self._plan.idle_s:g} s; send its first request with sequence_start"
        )

    def _require_taken(self, request: InferRequest, key: SequenceId, sequence: Sequence | None, *, starts: bool) -> None:
        """Check that a request may run or wait here.

        Raises:
            InferenceError: the request may neither run nor wait.
        """
        if self._drained is not None and (starts or self.successor is None):
            raise UnavailableError(SHUTTING_DOWN)
        self._controls.require_fitting(key, self._label)
        if self._table.has_free_slot if sequence is None else sequence.is_idle:
            return
        limits, held = self._limits, self._waiting_bytes + request.size
        if self._waiting >= limits.max_waiting or (held > limits.max_waiting_bytes and self._waiting):
            full = FullError(f"{self._waiting} requests wait behind others of their sequence, or for a slot for their sequence")
            raise full_error(full, self._waiting, self._statistics)

    def _warn_of_restart(self, key: SequenceId) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_S:
            self._warned_at = now
            said = "%s: sequence %r begins again before it has ended; do two clients use one id?"
            logger.warning(said, self._label, key, extra={"model": self._label})

    def _wait(self, step: Step) -> None:
        request = step.request
        if step.sequence.slot is not None:
            request.leave_by = None  # as in Triton, only requests that wait for a slot expire
        step.sequence.waiting.append(step)
        self._waiting += 1
        self._waiting_bytes += request.size
        if request.deadline is not None or request.leave_by is not None:
            self._sweep_by(request)

    def _taken(self, step: Step) -> None:
        self._waiting -= 1
        self._waiting_bytes -= step.request.size

    def _run(self, step: Step) -> None:
        """Submit a request to the batcher.

        Raises:
            InferenceError: the request is refused.
        """
        sequence, request = step.sequence, step.request
        states = self._initial if step.starts or sequence.states is None else sequence.states
        added = self._controls.of(sequence.key, starts=step.starts, ends=step.ends)
        for name, state in zip(self._state_inputs, states, strict=True):
            added[name] = state
        request.inputs = StepInputs(request.inputs, added)
        request.outputs = step.wanted + tuple([name for name in self._state_outputs if name not in step.wanted])
        if self._sizes_vary:
            request.bucket = (request.bucket, *(state.shape for state in states))
        if step.starts:
            sequence.has_begun = False
        request.leave_by = None  # the timeout holds for the backlog, which it has left
        sequence.running = step
        try:
            self._batcher.submit(request)
        except InferenceError:
            sequence.running = None
            raise

    def _states(self, outputs: Tensors) -> tuple[Array, ...]:
        """Copy a request's states from its outputs, because a view would keep the outputs of the whole batch in memory."""
        states = []
        for name, state in zip(self._state_outputs, self._plan.states, strict=True):
            array = outputs[name][-1:] if self._plan.batched else outputs[name]
            if array.ndim != len(state.input.shape) or (self._plan.batched and len(array) != 1):
                raise BackendError(f"the state {name!r} has shape {list(array.shape)}, expected {list(state.input.shape)}")
            states.append(array.copy())
        return tuple(states)

    def _undo(self, sequence: Sequence, step: Step) -> list[Step]:
        """Reset the sequence to its state before a failed request. Returns the requests behind it, which must fail."""
        if step.starts:
            sequence.has_begun = False
        return self._cut(sequence, None)

    def _cut(self, sequence: Sequence, step: Step | None) -> list[Step]:
        """Remove a waiting request and those behind it, or all for None. Returns those behind it, in order."""
        behind: list[Step] = []
        while sequence.waiting:
            last = sequence.waiting.pop()
            self._taken(last)
            if last is step:
                break
            behind.append(last)
        return behind[::-1]

    def _fail_behind(self, steps: list[Step], *, is_cancelled: bool = False) -> None:
        """Fail the requests behind one that failed, or was cancelled."""
        happened = "was cancelled" if is_cancelled else "failed"
        for step in steps:
            text = (
                f"a request of sequence {step.sequence.key!r} of model {self._label!r} {happened} before this one, which was "
                f"not computed; continue with the request that {happened}, or start the sequence again"
            )
            self._fail(step, RequestCancelledError(text) if is_cancelled else FailedPreconditionError(text))

    def _fail(self, step: Step, error: InferenceError) -> None:
        self._statistics.failed(step.request.arrived_ns, error)
        step.answer(error)

    def _advance(self, sequence: Sequence) -> None:
        """Submit the next request of a sequence to the batcher; a sequence without a further request is idle or has ended."""
        while sequence.waiting and sequence.running is None and sequence.slot is not None:
            step = sequence.waiting.popleft()
            self._taken(step)
            now = time.monotonic()
            try:
                if is_late(step.request, now, now):
                    error = late_error(step.request, now)
                    self._statistics.failed(step.request.arrived_ns, error)
                    raise error
                self._run(step)
            except InferenceError as error:
                behind = self._undo(sequence, step)
                step.answer(error)
                self._fail_behind(behind)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        if not sequence.is_idle:
            return
        keeps = sequence.has_begun and (self._drained is None or self.successor is not None)
        if keeps:
            self._table.idle[sequence] = time.monotonic()
            if self._idle_check is None:
                self._idle_check = asyncio.get_running_loop().call_later(self._plan.idle_s, self._check_idle)
        else:
            self._table.remove(sequence)
            self._fill_slots()

    def _fill_slots(self) -> None:
        """Give free slots to the sequences that wait for one."""
        if self._is_filling:  # a caller's loop does it
            return
        self._is_filling = True
        try:
            while (sequence := self._table.next_from_backlog()) is not None:
                self._advance(sequence)
                for step in sequence.waiting:
                    step.request.leave_by = None
        finally:
            self._is_filling = False
        self._notice_drained()

    def _check_idle(self) -> None:
        self._idle_check = None
        now, idle = time.monotonic(), self._table.idle
        while idle:
            sequence, since = next(iter(idle.items()))
            if since + self._plan.idle_s > now:
                left_s = since + self._plan.idle_s - now
                self._idle_check = asyncio.get_running_loop().call_later(left_s, self._check_idle)
                break
            self._table.remove(sequence)
            self.expired += 1
        self._fill_slots()

    def _end_idle(self) -> None:
        for sequence in list(self._table.idle):
            self._table.remove(sequence)
        self._fill_slots()

    def _sweep_by(self, request: InferRequest) -> None:
        """Schedule a check for requests that wait too long, at the latest when this one does."""
        moment = min(end for end in (request.deadline, request.leave_by, math.inf) if end is not None)
        if moment < self._sweep_at:
            if self._sweep is not None:
                self._sweep.cancel()
            self._sweep_at = moment
            delay_s = max(moment, self._swept_at + SWEEP_S) - time.monotonic()
            self._sweep = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._drop_late)

    def _drop_late(self) -> None:
        now = self._swept_at = time.monotonic()
        self._sweep, self._sweep_at = None, math.inf
        for sequence in self._table.all():
            late = next((step for step in sequence.waiting if is_late(step.request, now, now)), None)
            if late is not None:
                behind = self._cut(sequence, late)
                self._fail(late, late_error(late.request, now))
                self._fail_behind(behind)
                self._settle(sequence)
            for step in sequence.waiting:
                self._sweep_by(step.request)

    def _notice_drained(self) -> None:
        if self._drained is not None and not len(self._table):
            self._drained.set()
