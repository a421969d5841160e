"""A running sequence and its requests."""

from __future__ import annotations

from collections import deque
from typing import Protocol, TypeAlias

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.requests import Answer, InferRequest, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, Tensors

SequenceId: TypeAlias = int | str


class StepScheduler(Protocol):
    """The scheduler of a sequence's requests, as a step sees it."""

    def finished(self, step: Step, result: Tensors | InferenceError) -> None:
        """Take the result of a request that has been computed, or has failed."""

    def gone(self, step: Step) -> None:
        """Drop an unanswered request whose client has gone."""


class Sequence:
    """Requests that belong together. One at a time is computed; the others wait here in order.

    Attributes:
        key: the client's id of the sequence.
        slot: number of its slot; None while it waits for one.
        states: the model's states, each of one row, in the order of the plan; None for the states of a new sequence.
        has_begun: whether a request that starts it was answered, and none that ends it.
        running: its request that the batcher holds.
        waiting: its requests behind the running one.
    """

    __slots__ = ("has_begun", "key", "running", "slot", "states", "waiting")

    def __init__(self, key: SequenceId) -> None:
        self.key = key
        self.slot: int | None = None
        self.states: tuple[Array, ...] | None = None
        self.has_begun = False
        self.running: Step | None = None
        self.waiting: deque[Step] = deque()

    @property
    def is_open(self) -> bool:
        """Whether a request may come that does not start the sequence."""
        last = self.waiting[-1] if self.waiting else self.running
        return self.has_begun if last is None else not last.ends

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.waiting


class Step:
    """One request of a sequence; it replaces the request's `done`.

    Attributes:
        request: the client's request; `submit` of the scheduler adds the server's inputs and the outputs with states.
        sequence: the sequence of the request.
        starts: whether it begins the sequence.
        ends: whether it is the sequence's last.
        is_over: whether it is answered, or its client has gone.
    """

    __slots__ = ("_done", "_outputs", "ends", "is_over", "request", "scheduler", "sequence", "starts")

    def __init__(
        self, scheduler: StepScheduler, request: InferRequest, sequence: Sequence, *, starts: bool, ends: bool
    ) -> None:
        self.scheduler = scheduler
        self.request = request
        self.sequence = sequence
        self.starts = starts
        self.ends = ends
        self.is_over = False
        self._done = request.done
        self._outputs = request.outputs
        request.done = self

    def __call__(self, result: Tensors | InferenceError) -> None:
        """Take the request's outputs, or its error."""
        self.scheduler.finished(self, result)

    @property
    def wanted(self) -> tuple[str, ...]:
        """The outputs that the client wants."""
        return self._outputs

    def answer(self, result: Tensors | InferenceError) -> None:
        """Give the client its outputs or its error, unless it has gone."""
        self.close()
        self.request.finish(result if isinstance(result, InferenceError) else self._for_client(result))

    def close(self) -> None:
        """Break the reference cycle between the request and this step."""
        self.is_over = True
        self.request.done = self._done

    def _for_client(self, result: Tensors) -> Tensors:
        """Return the outputs that the client wants, without the rows of slots that had no request."""
        if type(result) is Answer:  # outside the compiled build, isinstance takes a dict for an Answer
            return result.last_row(self._outputs)
        # A Python model may leave outputs out; a decoupled one has sent its responses before.
        names = [name for name in self._outputs if name in result]
        wanted = {name: result[name][-1:] if self.request.rows > 1 else result[name] for name in names}
        return RemarkedAnswer(wanted, result.parameters) if isinstance(result, RemarkedAnswer) else wanted
