"""One request of an ensemble: sends a step's request as soon as its inputs are there, and answers with the last one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic_ns
from types import MappingProxyType
from typing import Final

from halfserve.serve.engine.ensembles.binding import Binding, Plan
from halfserve.serve.engine.ensembles.bound_step import BoundStep, named
from halfserve.serve.engine.errors import BackendError, InferenceError
from halfserve.serve.engine.model_statistics import BatchTimes, Statistics
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

NOTHING: Final[Tensors] = MappingProxyType({})  # in place of the answer of a step that has not been computed


class StepCall:
    """One step's call: takes the answer, and knows how long the steps on the way to it have computed.

    Attributes:
        step: that is called.
        request: to its model.
        input_ns: time of the steps on the longest way here, this one included once it is answered, by stage.
        infer_ns: likewise.
        output_ns: likewise.
    """

    __slots__ = ("_run", "infer_ns", "input_ns", "output_ns", "request", "step")

    def __init__(self, run: EnsembleRun, step: BoundStep, before: StepCall | None) -> None:
        """`before`: the call whose answer this one has waited for last."""
        self._run = run
        self.step = step
        self.request: InferRequest | None = None
        self.input_ns: int = 0 if before is None else before.input_ns
        self.infer_ns: int = 0 if before is None else before.infer_ns
        self.output_ns: int = 0 if before is None else before.output_ns

    def __call__(self, result: Tensors | InferenceError) -> None:
        self._run.answered(self, result)

    def count(self) -> None:
        """Add the times of the batch whose answers are being delivered, which is this step's unless something else answered."""
        times, request = self.step.model.statistics.latest, self.request
        if times is not None and request is not None and times.started >= request.arrived_ns:
            self.input_ns += times.assembled - times.started
            self.infer_ns += times.computed - times.assembled
            self.output_ns += times.split - times.computed


class EnsembleRun:
    """A request of an ensemble from its first step to its answer. Lives on the event loop."""

    __slots__ = ("_answers", "_binding", "_calls", "_ended", "_left", "_plan", "_request", "_statistics", "_waits")

    def __init__(self, request: InferRequest, binding: Binding, statistics: Statistics, ended: Callable[[], None]) -> None:
        """`ended` is called once, when the run ends in any way."""
        self._request = request
        self._binding = binding
        self._statistics = statistics
        self._ended = ended
        self._plan: Plan = binding.plan(request.outputs)
        self._waits = self._plan.waits.copy()
        self._left = self._plan.count
        self._answers: list[Tensors] = [NOTHING] * len(self._waits)
        self._calls: dict[int, StepCall] = {}  # under way, by the step's index

    def start(self) -> None:
        """Send the requests of the steps that wait for no other.

        Raises:
            InferenceError: one is refused; the run has ended, and the request's `done` is not called.
        """
        self._request.line = self
        self._binding.begin()
        try:
            for index in self._plan.starts:
                self._call(index, None)
        except InferenceError as error:
            self._end()
            self._statistics.failed(self._request.arrived_ns, error)
            raise
        except Exception as error:
            self._end()
            unknown = self._unknown(error)
            self._statistics.failed(self._request.arrived_ns, unknown)
            raise unknown from error

    def cancel(self) -> None:
        """The client has gone: drop the steps under way."""
        self._end()
        self._statistics.failed(self._request.arrived_ns)

    def answered(self, call: StepCall, result: Tensors | InferenceError) -> None:
        """A step has been computed, or has failed."""
        index = call.step.index
        if self._calls.pop(index, None) is None:
            return
        if isinstance(result, InferenceError):
            call.request = None
            self._fail(named(result, call.step.label))
            return
        try:
            call.count()
            call.request = None  # it refers to the call
            self._answers[index] = result
            self._left -= 1
            if not self._left:
                self._finish(call)
                return
            for follower in self._plan.followers[index]:
                self._waits[follower] -= 1
                if not self._waits[follower]:
                    self._call(follower, call)
        except InferenceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (the request must be answered, whatever a step's model has answered)
            self._fail(self._unknown(error))

    def _call(self, index: int, before: StepCall | None) -> None:
        step = self._binding.steps[index]
        call = StepCall(self, step, before)
        request = step.request(self._request, self._answers, self._plan.asked[index], call)
        if request.callers:
            request.callers = (*request.callers, self._binding.caller)
        call.request = request
        self._calls[index] = call
        try:
            step.model.scheduler.submit(request)
        except InferenceError as error:
            del self._calls[index]
            call.request = None
            raise named(error, step.label) from None

    def _finish(self, last: StepCall) -> None:
        outputs = self._plan.outputs(self._answers)
        request = self._request
        split = monotonic_ns()
        computed = split - last.output_ns
        assembled = computed - last.infer_ns
        started = max(request.arrived_ns, assembled - last.input_ns)
        times = BatchTimes(started=started, assembled=assembled, computed=computed, split=split)
        self._end()
        self._statistics.batch_done(times, [request.arrived_ns], request.rows)
        request.finish(outputs)

    def _fail(self, error: InferenceError) -> None:
        if self._request.line is not self:  # it has ended
            return
        self._end()
        self._statistics.failed(self._request.arrived_ns, error)
        self._request.finish(error)

    def _end(self) -> None:
        """Drop the steps under way and let go of the models."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if call.request is not None:
                call.step.model.scheduler.cancel(call.request)
                call.request = None
        self._request.line = None
        self._binding.end()
        self._ended()

    def _unknown(self, error: Exception) -> BackendError:
        logger.error("a step of an ensemble answered what its model does not declare", exc_info=error)
        return BackendError(f"a step answered what its model does not declare: {type(error).__name__}")
