"""One request of an ensemble: sends a step's request as soon as its inputs are there, and answers with the last one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic, monotonic_ns
from types import MappingProxyType
from typing import Final

from halfserve.serve.engine.ensembles.binding import Binding, Plan
from halfserve.serve.engine.ensembles.bound_step import BoundStep, named
from halfserve.serve.engine.errors import BackendError, InferenceError
from halfserve.serve.engine.model_statistics import BatchTimes, Statistics
from halfserve.serve.engine.queueing.admission_control import late_error
from halfserve.serve.engine.queueing.step_memory import COUNTED_BYTES, RunSizes, bytes_of
from halfserve.serve.engine.queueing.waiting_line import is_late
from halfserve.serve.engine.requests import Answer, InferRequest
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

    __slots__ = (
        "_answers", "_binding", "_calls", "_claim", "_ended", "_held", "_left", "_plan", "_request", "_sizes", "_statistics",
        "_waits",
    )  # fmt: skip

    def __init__(
        self, request: InferRequest, binding: Binding, sizes: RunSizes, statistics: Statistics, ended: Callable[[], None]
    ) -> None:
        """`sizes`: of the ensemble's runs; `ended` is called once, when the run ends in any way."""
        self._request = request
        self._binding = binding
        self._sizes = sizes
        self._claim = self._held = 0  # bytes of tensors between the steps
        self._statistics = statistics
        self._ended = ended
        self._plan: Plan = binding.plan(request.outputs)
        self._waits = self._plan.waits.copy()
        self._left = self._plan.count
        self._answers: list[Tensors] = [NOTHING] * len(self._waits)
        self._calls: dict[int, StepCall] = {}  # under way, by the step's index

    @property
    def expected_bytes(self) -> int:
        """See `WaitingRun`."""
        return self._sizes.claim

    def start(self) -> None:
        """Send the requests of the steps that wait for no other, now or when there is memory for what is between the steps.

        Raises:
            InferenceError: one is refused; the run has ended, and the request's `done` is not called.
        """
        self._request.line = self
        self._binding.begin()
        sizes = self._sizes
        if not sizes.expected or sizes.memory.has_room(sizes.claim) or self._is_within:
            self._start()
            return
        try:
            sizes.memory.wait(self)
        except InferenceError as error:
            self._end()
            self._statistics.failed(self._request.arrived_ns, error)
            raise

    def begin(self) -> None:
        """See `WaitingRun`."""
        now = monotonic()
        if is_late(self._request, now, now):
            self._fail(late_error(self._request, now))
            return
        try:
            self._start()
        except InferenceError as error:
            self._request.finish(error)

    @property
    def _is_within(self) -> bool:
        """Whether it is a step of another run, or a model's call: what waits for it holds memory or an instance meanwhile."""
        return bool(self._request.callers) or self._request.is_step

    def _start(self) -> None:
        if self._sizes.expected:
            self._change_claim()
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
            rows = 1 if call.request is None else call.request.rows
            call.request = None  # it refers to the call
            self._answers[index] = result
            self._left -= 1
            if not self._left:
                self._finish(call)
                return
            row_bytes = self._plan.row_bytes[index]
            self._held += bytes_of(result) if row_bytes is None or type(result) is not Answer else rows * row_bytes
            if self._held >= COUNTED_BYTES:
                self._hold()
            for follower in self._plan.followers[index]:
                self._waits[follower] -= 1
                if not self._waits[follower]:
                    self._call(follower, call)
        except InferenceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (the request must be answered, whatever a step's model has answered)
            self._fail(self._unknown(error))

    def _hold(self) -> None:
        """Claim what is held.

        Raises:
            UnavailableError: all runs together hold too much.
        """
        self._sizes.grown(self._held)
        self._change_claim()
        if not self._is_within:
            self._sizes.memory.require_within(self._claim)

    def _change_claim(self) -> None:
        before, self._claim = self._claim, self._sizes.claim
        if self._claim != before:
            self._sizes.memory.change(self._claim - before)

    def _call(self, index: int, before: StepCall | None) -> None:
        step = self._binding.steps[index]
        call = StepCall(self, step, before)
        request = step.request(self._request, self._answers, self._plan.asked[index], call)
        if request.callers:
            request.callers = (*request.callers, self._binding.caller)
        request.is_step = True
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
        if self._sizes.expected or self._held >= COUNTED_BYTES:
            self._sizes.ended(self._held)
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
        if self._sizes.expected or self._claim:
            self._sizes.memory.leave(self, self._claim)
            self._claim = 0
        self._binding.end()
        self._ended()

    def _unknown(self, error: Exception) -> BackendError:
        logger.error("a step of an ensemble answered what its model does not declare", exc_info=error)
        return BackendError(f"a step answered what its model does not declare: {type(error).__name__}")
