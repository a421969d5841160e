"""Results of computed batches: what a copy of a model reports for the requests of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.requests import Done, InferRequest
from halfserve.serve.engine.tensors import Tensors


class LaterAnswer:
    """An answer that its model gives after the batch has ended. Used on the event loop only."""

    __slots__ = ("_done", "_result")

    def __init__(self) -> None:
        self._result: Tensors | InferenceError | None = None
        self._done: Done | None = None

    def give(self, result: Tensors | InferenceError) -> None:
        """Deliver the answer. Called once."""
        self._result = result
        if self._done is not None:
            self._done(result)

    def then(self, done: Done) -> None:
        """Call `done` with the answer, at once if it has been given. Called once."""
        self._done = done
        if self._result is not None:
            done(self._result)


class BegunBatch:
    """A batch that a backend answers without a thread that waits for the answers."""

    def ready(self, *, at_once: bool) -> None:
        """End the batch; called once, on the event loop, when the backend has answered or a thread has to wait for it.

        `at_once`: whether the backend's `compute` returns at once. A thread is to call it otherwise.
        """
        raise NotImplementedError(at_once)


class Answered:
    """Requests that were computed together.

    Attributes:
        requests: requests in order of arrival.
        answers: one answer per request.
        times: times at which the batch passed each stage.
    """

    __slots__ = ("answers", "requests", "times")

    def __init__(self, requests: list[InferRequest], answers: list[Tensors], times: BatchTimes) -> None:
        self.requests = requests
        self.answers = answers
        self.times = times


@dataclass(frozen=True)
class Failed:
    """A request that could not be computed, not even alone."""

    request: InferRequest
    error: InferenceError


@dataclass(frozen=True)
class PendingAnswers:
    """Requests whose responses come later.

    Attributes:
        later: requests with the answers to wait for; requests that are not listed end by themselves.
        times: times at which the batch passed each stage.
    """

    later: list[tuple[InferRequest, LaterAnswer]]
    times: BatchTimes


@dataclass(frozen=True)
class Rescheduled:
    """Requests that their model wants once more."""

    requests: list[InferRequest]


@dataclass(frozen=True)
class LostRequests:
    """Requests that were being computed when their copy broke; another copy may compute them.

    Attributes:
        requests: requests in order of arrival.
        error: their error if no other copy computes them.
        fault: text of the fault if this batch broke the copy; None if their batch had not begun, so that none of the requests
            has broken the copy.
    """

    requests: list[InferRequest]
    error: InferenceError
    fault: str | None = None


@dataclass(frozen=True)
class LateRequests:
    """Requests whose time ran out behind the previous batch of their copy; they were not computed."""

    requests: list[InferRequest]


Results: TypeAlias = Sequence[Answered | Failed | PendingAnswers | Rescheduled | LostRequests | LateRequests]


def seconds_of(results: Results) -> float | None:
    """Return the seconds that a batch took; None if it did not run as a whole."""
    first = results[0]
    if len(results) > 1 or not isinstance(first, Answered):
        return None
    return (first.times.split - first.times.started) / 1e9


def fault_of(results: Results) -> str | None:
    """Return the fault of the copy that a batch has broken; None if the copy still computes."""
    last = results[-1]
    return last.fault if isinstance(last, LostRequests) else None
