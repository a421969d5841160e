"""Gives slots to a model's sequences, and passes the requests of each to the batcher one after the other.

A failed request leaves the sequence's states unchanged, and the requests that already wait behind it fail with it, because they
would otherwise be computed on states that lack a step. If a request is cancelled, the requests behind it are cancelled too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, RequestCancelledError
from halfserve.serve.engine.model import Scheduler
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.admission_control import late_error
from halfserve.serve.engine.queueing.deadline_timer import DeadlineTimer
from halfserve.serve.engine.queueing.waiting_requests import is_late
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence import Sequence, SequenceId, SequenceTable, Step
from halfserve.serve.engine.sequences.slot_batches import SlotBatches
from halfserve.serve.engine.sequences.step_inputs import ControlTensors, StateTensors, StepInputs
from halfserve.serve.engine.tensors import Tensors


class IdleSequences:
    """The running sequences without a request, the longest idle first."""

    def __init__(self, idle_s: float, expire: Callable[[list[Sequence]], None]) -> None:
        """`expire`: takes the sequences that have been idle for `idle_s` seconds, and are no longer here."""
        self._idle_s = idle_s
        self._expire = expire
        self._since: dict[Sequence, float] = {}  # start of their idle time, in seconds
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sequence: Sequence) -> None:
        """Add a sequence whose last request was just answered."""
        self._since[sequence] = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._check)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that has a request again."""
        self._since.pop(sequence, None)

    def take_all(self) -> list[Sequence]:
        """Remove and return all sequences."""
        sequences = list(self._since)
        self._since.clear()
        return sequences

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        expired: list[Sequence] = []
        for sequence, since in self._since.items():
            if since + self._idle_s > now:
                self._timer = asyncio.get_running_loop().call_later(since + self._idle_s - now, self._check)
                break
            expired.append(sequence)
        for sequence in expired:
            del self._since[sequence]
        self._expire(expired)


class WaitingSteps:
    """Counts the requests that wait for their turn or a slot, and has those removed that wait too long.

    Attributes:
        count: number of these requests.
        size: bytes of these requests.
    """

    def __init__(self, drop_late: Callable[[float], None]) -> None:
        """`drop_late`: see `DeadlineTimer`."""
        self.count = self.size = 0
        self._timer = DeadlineTimer(drop_late)

    def add(self, step: Step) -> None:
        """Count a request that joins the waiting requests of its sequence."""
        request = step.request
        if step.sequence.slot is not None:
            request.leave_by = None  # as in Triton, only requests that wait for a slot expire
        step.sequence.waiting.append(step)
        self.count += 1
        self.size += request.size
        self.watch(request)

    def left(self, step: Step) -> None:
        """Count a request that has left the waiting requests of its sequence."""
        self.count -= 1
        self.size -= step.request.size

    def watch(self, request: InferRequest) -> None:
        """Have a waiting request dropped when its time runs out."""
        self._timer.watch(request.deadline, request.leave_by)

    def stop(self) -> None:
        """Cancel the timer."""
        self._timer.stop()


class SequenceRunner:
    """Runs the sequences of one model version. Lives on the event loop.

    Attributes:
        table: the sequences.
        controls: the control inputs of the model.
        waiting: the requests that wait for their turn or a slot.
        expired: number of sequences that were ended because they were idle for too long.
        keeps_idle: whether a sequence without a request keeps its slot until it is idle for too long; it ends at once if not.
    """

    def __init__(
        self, label: str, plan: SequencePlan, batcher: Scheduler, statistics: Statistics, on_empty: Callable[[], None]
    ) -> None:
        """`label`: the model's name; `batcher`: takes one request of a sequence at a time; `on_empty`: called whenever no
        sequence is left.
        """
        self.table = SequenceTable(plan.slots)
        self.controls = ControlTensors(plan)
        self.waiting = WaitingSteps(self._drop_late)
        self.expired = 0
        self.keeps_idle = True
        self._label = label
        self._batcher = batcher
        self._statistics = statistics
        self._on_empty = on_empty
        self._states = StateTensors(plan)
        self._idle = IdleSequences(plan.idle_s, self._expire)
        self._is_filling = False

    def runs_at_once(self, sequence: Sequence | None) -> bool:
        """Return whether a request would not wait here; `sequence`: None for a new one."""
        return self.table.has_free_slot if sequence is None else sequence.is_idle

    def submit(self, request: InferRequest, key: SequenceId, sequence: Sequence | None, *, starts: bool, ends: bool) -> None:
        """Take a request of a sequence; `sequence`: None for a new one.

        Raises:
            InferenceError: the batcher refuses the request.
        """
        runs_at_once = self.runs_at_once(sequence)
        if sequence is None:
            sequence = self.table.add(key)
        step = Step(self, request, sequence, starts=starts, ends=ends)
        if not runs_at_once:
            self.waiting.add(step)
            return
        self._idle.discard(sequence)
        try:
            self._run(step)
        except InferenceError:
            step.close()
            self._settle(sequence)
            raise

    def finished(self, step: Step, result: Tensors | InferenceError) -> None:
        """Take the result of a request from the batcher."""
        sequence = step.sequence
        sequence.running = None
        if isinstance(self._batcher, SlotBatches):
            self._batcher.computed(step.request)
        if not isinstance(result, InferenceError):
            try:
                sequence.states = self._states.after(result)
            except InferenceError as error:
                self._statistics.failed(step.request.arrived_ns, error)
                result = error
        if isinstance(result, InferenceError):
            behind = self._undo(sequence, step)
            step.answer(result)
            self._fail_behind(behind)
        else:
            sequence.has_started = not step.ends
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

    def end_idle(self) -> None:
        """End the sequences without a request, now and from now on."""
        self.keeps_idle = False
        for sequence in self._idle.take_all():
            self.table.remove(sequence)
        self._fill_slots()

    def stop(self) -> None:
        """Cancel the timers."""
        self._idle.stop()
        self.waiting.stop()

    def _run(self, step: Step) -> None:
        sequence, request = step.sequence, step.request
        states = self._states.before(None if step.starts else sequence.states)
        added = self.controls.of(sequence.key, starts=step.starts, ends=step.ends)
        added |= self._states.inputs(states)
        request.inputs = StepInputs(request.inputs, added)
        request.outputs = self._states.added_to(step.wanted)
        if self._states.sizes_vary:
            request.bucket = (request.bucket, *(state.shape for state in states))
        if step.starts:
            sequence.has_started = False
        request.leave_by = None  # the timeout holds for the backlog, which it has left
        sequence.running = step
        try:
            self._batcher.submit(request)
        except InferenceError:
            sequence.running = None
            raise

    def _undo(self, sequence: Sequence, step: Step) -> list[Step]:
        """Reset the sequence to its state before a failed request. Returns the requests behind it, which must fail."""
        if step.starts:
            sequence.has_started = False
        return self._cut(sequence, None)

    def _cut(self, sequence: Sequence, step: Step | None) -> list[Step]:
        """Remove a waiting request and those behind it, or all for None. Returns those behind it, in order."""
        behind: list[Step] = []
        while sequence.waiting:
            last = sequence.waiting.pop()
            self.waiting.left(last)
            if last is step:
                break
            behind.append(last)
        return behind[::-1]

    def _fail_behind(self, steps: list[Step], phrase: TritonPhrase | None = None, *, is_cancelled: bool = False) -> None:
        happened = "was cancelled" if is_cancelled else "failed"
        for step in steps:
            text = (
                f"a request of sequence {step.sequence.key!r} of model {self._label!r} {happened} before this one, which was "
                f"not computed; continue with the request that {happened}, or start the sequence again"
            )
            error = RequestCancelledError(text) if is_cancelled else FailedPreconditionError(text)
            self._fail(step, error if phrase is None else error.like(phrase))

    def _fail(self, step: Step, error: InferenceError) -> None:
        self._statistics.failed(step.request.arrived_ns, error)
        step.answer(error)

    def _advance(self, sequence: Sequence) -> None:
        """Submit the next request of a sequence to the batcher; a sequence without a further request is idle or has ended."""
        while sequence.waiting and sequence.running is None and sequence.slot is not None:
            step = sequence.waiting.popleft()
            self.waiting.left(step)
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
        """Keep a sequence without a request for its next one, or end it."""
        if not sequence.is_idle:
            return
        if sequence.has_started and self.keeps_idle:
            self._idle.add(sequence)
        else:
            self.table.remove(sequence)
            self._fill_slots()

    def _fill_slots(self) -> None:
        if self._is_filling:  # a caller's loop does it
            return
        self._is_filling = True
        try:
            while (sequence := self.table.next_from_backlog()) is not None:
                self._advance(sequence)
                for step in sequence.waiting:
                    step.request.leave_by = None
        finally:
            self._is_filling = False
        if not len(self.table):
            self._on_empty()

    def _expire(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.table.remove(sequence)
            self.expired += 1
        self._fill_slots()

    def _drop_late(self, now: float) -> None:
        for sequence in self.table.all():
            late = next((step for step in sequence.waiting if is_late(step.request, now, now)), None)
            if late is not None:
                behind = self._cut(sequence, late)
                self._fail(late, late_error(late.request, now).like(TritonPhrase.SEQUENCE_EXPIRED))
                self._fail_behind(behind, TritonPhrase.SEQUENCE_EXPIRED)
                self._settle(sequence)
            for step in sequence.waiting:
                self.waiting.watch(step.request)
