"""The schedulers of models with sequences, whose requests belong together, or of which each request is a sequence."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from itertools import count
from typing import Final

from halfserve.protos.request_parameters import SEQUENCE_ID, SEQUENCE_START
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.dispatch.refusals import SHUTTING_DOWN
from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, UnavailableError
from halfserve.serve.engine.model import Scheduler
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.queueing.admission_control import full_error
from halfserve.serve.engine.queueing.pace import BatchLimits
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence import Sequence, SequenceId, Step
from halfserve.serve.engine.sequences.sequence_runner import SequenceRunner
from halfserve.serve.engine.sequences.slot_batches import SlotBatches
from halfserve.serve.engine.sequences.step_inputs import ControlTensors, StepInputs, sequence_of
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

WARN_S: Final = 10.0  # least seconds between two warnings of one model


class SequenceScheduler:
    """Checks each request's place in its sequence, and hands sequences to a newer version. Lives on the event loop.

    Attributes:
        plan: controls, states, slots and times of the sequences.
        successor: scheduler of a newer version, which forwards requests of running sequences to this one; None without one.
        predecessor: scheduler of the previous version, while it still runs sequences.
    """

    def __init__(self, label: str, plan: SequencePlan, batcher: Scheduler, limits: BatchLimits, statistics: Statistics) -> None:
        """`label`: the model's name; `batcher`: takes one request of a sequence at a time."""
        self.plan = plan
        self.successor: SequenceScheduler | None = None
        self.predecessor: SequenceScheduler | None = None
        self._label = label
        self._batcher = batcher
        self._limits = limits
        self._statistics = statistics
        self._runner = SequenceRunner(label, plan, batcher, statistics, self._notice_empty)
        self._warned_at = -math.inf
        self._drained: asyncio.Event | None = None
        self._empty = asyncio.Event()

    @property
    def running_sequences(self) -> int:
        """Number of sequences with a slot."""
        return self._runner.table.running

    @property
    def backlog(self) -> int:
        """Number of sequences that wait for a slot."""
        return self._runner.table.backlog

    @property
    def expired(self) -> int:
        """Number of sequences that were ended because they were idle for too long."""
        return self._runner.expired

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot, or for the request before them."""
        return self._runner.waiting.count

    @property
    def pending(self) -> int:
        """Number of requests that wait, including those with a row in a batch that is being formed."""
        return self.waiting + (self._batcher.waiting if isinstance(self._batcher, SlotBatches) else 0)

    def continues(self, key: SequenceId) -> bool:
        """Return whether the sequence runs here and takes further requests."""
        sequence = self._runner.table.find(key)
        return sequence is not None and sequence.is_open

    def takes_further(self, request: InferRequest) -> bool:
        """Return whether a request continues a sequence that runs here or at the predecessor.

        Raises:
            InvalidArgumentError: its parameters are wrong.
        """
        key, starts, _ = sequence_of(request, self._label)
        return not starts and (self.continues(key) or (self.predecessor is not None and self.predecessor.continues(key)))

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence runs or waits here or at the predecessor."""
        return bool(len(self._runner.table)) or (self.predecessor is not None and self.predecessor.has_sequences)

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return not self.has_sequences and self._batcher.is_idle

    async def ended(self) -> None:
        """Return once the sequences here and at the predecessor have ended."""
        if self.predecessor is not None:
            await self.predecessor.ended()
        while len(self._runner.table):
            self._empty.clear()
            await self._empty.wait()

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
            sequence = self._runner.table.find(key)
            before = self._before(key, sequence) if not starts else None
            if before is None:
                self._require_taken(request, key, sequence, starts=starts)
        except InferenceError as error:
            self._statistics.failed(request.arrived_ns, error)
            raise
        if before is not None:
            before.submit(request)
            return
        if starts and sequence is not None and sequence.is_open:
            self._warn_of_restart(key)
        self._runner.submit(request, key, sequence, starts=starts, ends=ends)

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
                self._runner.end_idle()
            elif not len(self._runner.table):
                self._drained.set()
        await self._drained.wait()
        if self.successor is not None:
            self.successor.predecessor = None
        self.let_go()
        self._runner.stop()
        await self._batcher.drain()

    def follow(self, old: SequenceScheduler) -> None:
        """Forward requests of running sequences to `old`, the scheduler of the previous version. At most two versions run, so
        `old` lets go of the version before it.
        """
        if old.predecessor is not None:
            old.predecessor.let_go()
            old.predecessor = None
        if old.successor is not None:
            old.successor.predecessor = None
        old.successor, self.predecessor = self, old
        old._runner.keeps_idle = True

    def let_go(self) -> None:
        """Wait for no further requests of running sequences."""
        self.successor = None
        if self._drained is not None:
            self._runner.end_idle()

    def _before(self, key: SequenceId, sequence: Sequence | None) -> SequenceScheduler | None:
        """Return the predecessor, if a request continues a sequence that runs there; None if it runs here."""
        if sequence is not None and sequence.is_open:
            return None
        if self.predecessor is not None and self.predecessor.continues(key):
            return self.predecessor
        raise InvalidArgumentError(
            f"sequence {key!r} of model {self._label!r} is not running: it was not started, has ended, or had no request for "
            f"{self.plan.idle_s:g} s; send its first request with sequence_start"
        ).like(TritonPhrase.NOT_STARTED, sequence=key, model=self._label.partition("/")[0])

    def _require_taken(self, request: InferRequest, key: SequenceId, sequence: Sequence | None, *, starts: bool) -> None:
        """Check that a request may run or wait here."""
        if self._drained is not None and (starts or self.successor is None):
            raise UnavailableError(SHUTTING_DOWN).like(TritonPhrase.STOPPING)
        self._runner.controls.require_fitting(key, self._label)
        if self._runner.runs_at_once(sequence):
            return
        limits, waiting = self._limits, self._runner.waiting.count
        held = self._runner.waiting.size + request.size
        if waiting >= limits.max_waiting or (held > limits.max_waiting_bytes and waiting):
            full = FullError(f"{waiting} requests wait behind others of their sequence, or for a slot for their sequence")
            raise full_error(full, waiting, self._statistics)

    def _warn_of_restart(self, key: SequenceId) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_S:
            self._warned_at = now
            said = "%s: sequence %r begins again before it has ended; do two clients use one id?"
            logger.warning(said, self._label, key, extra={"model": self._label})

    def _notice_empty(self) -> None:
        self._empty.set()
        if self._drained is not None:
            self._drained.set()


class _Iteration(StepInputs):
    """The inputs of one execution of a request.

    Attributes:
        given: the client's inputs.
        key: the sequence's id.
    """

    __slots__ = ("given", "key")

    def __init__(self, given: Tensors, controls: Tensors, key: SequenceId) -> None:
        super().__init__(given, controls)
        self.given = given
        self.key = key


class IterativeRequests:
    """The scheduler of a model with `iterative_sequence`: each of its requests is a sequence, which lasts as long as the model
    asks for the request again, and whose start is the first execution.

    The model sees the start in the controls, if it has any, and in the request's correlation id and flags.
    """

    def __init__(self, scheduler: Scheduler, batcher: Batcher, plan: SequencePlan) -> None:
        """`scheduler`: takes the requests, which `batcher` queues again."""
        self._scheduler = scheduler
        self._controls = ControlTensors(plan) if plan.controls else None
        self._ids = count(1)
        batcher.on_reschedule(self._prepare_next_execution)

    def submit(self, request: InferRequest) -> None:
        """See `Scheduler`.

        Raises:
            InvalidArgumentError: the request has several rows, which the controls of one sequence do not fit.
        """
        controls = self._controls
        if controls is not None and request.rows != 1:
            raise InvalidArgumentError(f"the batch size is {request.rows}, expected 1: each request is a sequence")
        key = self._key(request)
        request.parameters = {**request.parameters, SEQUENCE_ID: key, SEQUENCE_START: True}
        if controls is not None:
            request.inputs = _Iteration(request.inputs, controls.of(key, starts=True, ends=False), key)
        self._scheduler.submit(request)

    def cancel(self, request: InferRequest) -> None:
        self._scheduler.cancel(request)

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return self._scheduler.is_idle

    async def drain(self) -> None:
        await self._scheduler.drain()

    def _key(self, request: InferRequest) -> SequenceId:
        """Return the client's sequence id if the model's control takes its type, else a new one."""
        takes_text = self._controls is not None and self._controls.takes_text
        given = request.parameters.get(SEQUENCE_ID, 0)
        if given and isinstance(given, (int, str)) and (self._controls is None or isinstance(given, str) == takes_text):
            return given
        return str(next(self._ids)) if takes_text else next(self._ids)

    def _prepare_next_execution(self, request: InferRequest) -> None:
        request.parameters = {**request.parameters, SEQUENCE_START: False}
        inputs = request.inputs
        if self._controls is not None and isinstance(inputs, _Iteration):
            request.inputs = _Iteration(inputs.given, self._controls.of(inputs.key, starts=False, ends=False), inputs.key)
