"""Requests of a model with `iterative_sequence`: each is a sequence, and its model asks for it again until it has ended."""

from __future__ import annotations

from itertools import count

from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.scheduler import Scheduler
from halfserve.serve.engine.sequences.sequence import SequenceId
from halfserve.serve.engine.sequences.step_inputs import SEQUENCE_ID, ControlTensors, StepInputs
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
    """A scheduler that adds the controls to a model's requests: START is true in a request's first execution."""

    def __init__(self, scheduler: Scheduler, batcher: Batcher, plan: SequencePlan) -> None:
        """`scheduler`: takes the requests, which `batcher` queues again."""
        self._scheduler = scheduler
        self._controls = ControlTensors(plan) if plan.controls else None
        self._ids = count(1)
        if self._controls is not None:
            batcher.on_reschedule(self._go_on)

    def submit(self, request: InferRequest) -> None:
        """See `Scheduler`.

        Raises:
            InvalidArgumentError: it has several rows, which the controls of one sequence do not fit.
        """
        controls = self._controls
        if controls is not None:
            if request.rows != 1:
                raise InvalidArgumentError(f"the batch size is {request.rows}, expected 1: each request is a sequence")
            given = request.parameters.get(SEQUENCE_ID, 0)
            key = given if isinstance(given, (int, str)) and given and isinstance(given, str) == controls.takes_text else 0
            key = key or (str(next(self._ids)) if controls.takes_text else next(self._ids))
            request.inputs = _Iteration(request.inputs, controls.of(key, starts=True, ends=False), key)
        self._scheduler.submit(request)

    def cancel(self, request: InferRequest) -> None:
        """See `Scheduler`."""
        self._scheduler.cancel(request)

    async def drain(self) -> None:
        """See `Scheduler`."""
        await self._scheduler.drain()

    def _go_on(self, request: InferRequest) -> None:
        """Its model wants a request again."""
        inputs = request.inputs
        if self._controls is not None and isinstance(inputs, _Iteration):
            request.inputs = _Iteration(inputs.given, self._controls.of(inputs.key, starts=False, ends=False), inputs.key)
