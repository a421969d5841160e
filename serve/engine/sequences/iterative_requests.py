"""Requests of a model with `iterative_sequence`: each is a sequence, which lasts as long as its model asks for it again."""

from __future__ import annotations

from itertools import count

from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.scheduler import Scheduler
from halfserve.serve.engine.sequences.sequence import SequenceId
from halfserve.serve.engine.sequences.step_inputs import SEQUENCE_ID, SEQUENCE_START, ControlTensors, StepInputs
from halfserve.serve.engine.tensors import Tensors


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
    """A scheduler that makes each of a model's requests a sequence, whose start is its first execution.

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
        """See `Scheduler`."""
        self._scheduler.cancel(request)

    async def drain(self) -> None:
        """See `Scheduler`."""
        await self._scheduler.drain()

    def _key(self, request: InferRequest) -> SequenceId:
        """Return the client's sequence id if the model's control takes its type, else a new one."""
        takes_text = self._controls is not None and self._controls.takes_text
        given = request.parameters.get(SEQUENCE_ID, 0)
        if given and isinstance(given, (int, str)) and (self._controls is None or isinstance(given, str) == takes_text):
            return given
        return str(next(self._ids)) if takes_text else next(self._ids)

    def _prepare_next_execution(self, request: InferRequest) -> None:
        """Prepare a request that its model wants again."""
        request.parameters = {**request.parameters, SEQUENCE_START: False}
        inputs = request.inputs
        if self._controls is not None and isinstance(inputs, _Iteration):
            request.inputs = _Iteration(inputs.given, self._controls.of(inputs.key, starts=False, ends=False), inputs.key)
