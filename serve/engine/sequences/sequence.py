"""The sequences of a model version and their requests: which ones run, and which ones wait for a slot."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
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
        has_started: whether a request that starts it was answered, and none that ends it.
        running: its request that the batcher holds.
        waiting: its requests behind the running one.
    """

    __slots__ = ("has_started", "key", "running", "slot", "states", "waiting")

    def __init__(self, key: SequenceId) -> None:
        self.key = key
        self.slot: int | None = None
        self.states: tuple[Array, ...] | None = None
        self.has_started = False
        self.running: Step | None = None
        self.waiting: deque[Step] = deque()

    @property
    def is_open(self) -> bool:
        """Whether a request may come that does not start the sequence."""
        last = self.waiting[-1] if self.waiting else self.running
        return self.has_started if last is None else not last.ends

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


def slot_of(request: InferRequest) -> int:
    """Return the slot of a request's sequence."""
    step = request.done
    if not isinstance(step, Step) or step.sequence.slot is None:
        raise TypeError("the request is no step of a sequence with a slot")
    return step.sequence.slot


class SequenceTable:
    """The sequences of one model version: those with a slot run, the others wait for one in order of arrival.

    Attributes:
        slots: most sequences that can run at once.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._by_key: dict[SequenceId, Sequence] = {}
        self._backlog: dict[Sequence, None] = {}
        self._free: list[int] = []  # slots that were used before, as a heap
        self._used = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def running(self) -> int:
        """Number of sequences with a slot."""
        return len(self._by_key) - len(self._backlog)

    @property
    def backlog(self) -> int:
        """Number of sequences without a slot."""
        return len(self._backlog)

    @property
    def has_free_slot(self) -> bool:
        """Whether a new sequence would run at once."""
        return not self._backlog and (bool(self._free) or self._used < self.slots)

    def find(self, key: SequenceId) -> Sequence | None:
        return self._by_key.get(key)

    def all(self) -> list[Sequence]:
        return list(self._by_key.values())

    def add(self, key: SequenceId) -> Sequence:
        """Add a sequence, with a slot if one is free."""
        sequence = self._by_key[key] = Sequence(key)
        sequence.slot = None if self._backlog else self._take_slot()
        if sequence.slot is None:
            self._backlog[sequence] = None
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and free its slot."""
        if self._by_key.get(sequence.key) is not sequence:
            return
        del self._by_key[sequence.key]
        self._backlog.pop(sequence, None)
        if sequence.slot is not None:
            heappush(self._free, sequence.slot)

    def next_from_backlog(self) -> Sequence | None:
        """Give a free slot to the sequence that has waited longest, and return it; None if none waits, or no slot is free."""
        if not self._backlog:
            return None
        slot = self._take_slot()
        if slot is None:
            return None
        sequence = next(iter(self._backlog))
        del self._backlog[sequence]
        sequence.slot = slot
        return sequence

    def _take_slot(self) -> int | None:
        """Take the lowest free slot, so that batches with a row per slot stay small."""
        if self._free:
            return heappop(self._free)
        if self._used == self.slots:
            return None
        self._used += 1
        return self._used - 1
