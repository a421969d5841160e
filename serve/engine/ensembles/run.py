"""One request of an ensemble: sends a step's request as soon as its inputs are there, and answers once all steps are computed.

Each response of a decoupled step begins a branch of its own, through the steps that follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic, monotonic_ns
from types import MappingProxyType
from typing import Final

from halfserve.protos.request_parameters import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START
from halfserve.serve.engine.dispatch.refusals import SHUTTING_DOWN
from halfserve.serve.engine.ensembles.binding import Binding, ExecutionPlan
from halfserve.serve.engine.ensembles.bound_step import BoundStep, named
from halfserve.serve.engine.ensembles.composition import EnsembleComposition
from halfserve.serve.engine.ensembles.step_limit import StepLimit
from halfserve.serve.engine.errors import BackendError, InferenceError, OutOfMemoryError, UnavailableError, is_out_of_memory
from halfserve.serve.engine.model_statistics import BatchTimes, Statistics
from halfserve.serve.engine.queueing.admission_control import late_error
from halfserve.serve.engine.queueing.step_memory import RunMemory, RunSizes, bytes_of
from halfserve.serve.engine.queueing.waiting_requests import is_late
from halfserve.serve.engine.requests import NO_PARAMETERS, Answer, InferRequest, RemarkedAnswer
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.engine.whole_requests import require_many

logger = logging.getLogger(__name__)

NOTHING: Final[Tensors] = MappingProxyType({})  # in place of the answer of a step that has not been computed
RETRY_S: Final = 1.0  # about the time in which a model is reloaded


class Branch:
    """The answers along one path through the graph.

    Attributes:
        answers: answers of the steps, by the step's index.
        held: bytes of the answers that other steps read.
        left: number of steps without an answer.
        read: lets the decoupled step go on whose response began the branch; to be called once.
        waits: number of steps that each step still waits for, by its index.
    """

    __slots__ = ("answers", "held", "left", "read", "waits")

    def __init__(self, answers: list[Tensors], waits: list[int], left: int, read: Callable[[], None]) -> None:
        self.answers = answers
        self.held = 0
        self.left = left
        self.read = read
        self.waits = waits

    def fork(self, read: Callable[[], None]) -> Branch:
        """Return a branch for one response of a decoupled step."""
        return Branch(self.answers.copy(), self.waits.copy(), self.left, read)

    def end(self) -> None:
        """Let the decoupled step go on, as other branches have taken the place of this one."""
        read, self.read = self.read, _nothing
        read()


def _nothing() -> None:
    """Do nothing: no decoupled step waits for the branch."""


class StepCall:
    """One call of a step's model: takes the answer, and adds up the compute time of the steps on the way to it.

    Attributes:
        step: the called step.
        branch: branch that the call belongs to.
        limit: limit of the step, where the request counts; None for a step without one, and for a request that is not sent.
        request: request to the step's model; None while it waits for the limit of the step.
        input_ns: nanoseconds of assembling inputs in the steps on the longest path here, including this one once it is
            answered.
        infer_ns: nanoseconds of computing in these steps.
        output_ns: nanoseconds of splitting outputs in these steps.
    """

    __slots__ = ("_run", "branch", "infer_ns", "input_ns", "limit", "output_ns", "request", "step")

    def __init__(self, run: EnsembleRun, step: BoundStep, branch: Branch, before: StepCall | None) -> None:
        """`before`: the call whose answer arrived last among the inputs of this one."""
        self._run = run
        self.step = step
        self.branch = branch
        self.limit: StepLimit | None = None
        self.request: InferRequest | None = None
        self.input_ns: int = 0 if before is None else before.input_ns
        self.infer_ns: int = 0 if before is None else before.infer_ns
        self.output_ns: int = 0 if before is None else before.output_ns

    def __call__(self, result: Tensors | InferenceError) -> None:
        self._run.answered(self, result)

    def respond(self, result: Tensors | InferenceError, final: bool, read: Callable[[], None]) -> None:
        self._run.responded(self, result, read, final=final)

    def send(self) -> bool:
        """Send the request, as the limit of the step has room; returns False if the run has ended."""
        return self._run.admitted(self)

    def leave(self) -> None:
        """Make room for another request at the limit of the step."""
        limit, self.limit = self.limit, None
        if limit is not None:
            limit.leave()

    def count(self, request: InferRequest | None) -> None:
        """Add the times of the batch whose answers are being delivered, unless it began before this step's request arrived."""
        times = self.step.model.statistics.latest
        if times is not None and request is not None and times.started >= request.arrived_ns:
            self.input_ns += times.assembled - times.started
            self.infer_ns += times.computed - times.assembled
            self.output_ns += times.split - times.computed


class EnsembleRun:
    """A request of an ensemble from its first step to its answer. Lives on the event loop."""

    __slots__ = ("_binding", "_calls", "_ended", "_first_ns", "_limits", "_memory", "_plan", "_request", "_statistics")

    def __init__(
        self,
        request: InferRequest,
        binding: Binding,
        sizes: RunSizes,
        statistics: Statistics,
        ended: Callable[[], None],
        limits: list[StepLimit] | None = None,
    ) -> None:
        """Keep what the run needs.

        Args:
            request: the ensemble's request.
            binding: the steps with their models.
            sizes: sizes of the ensemble's runs.
            statistics: statistics of the ensemble.
            ended: called once, when the run ends in any way.
            limits: limit of each step's requests in flight; None without one.
        """
        self._request = request
        self._binding = binding
        self._limits = limits
        # As a step of another run, or a model's call, its caller holds memory or an instance meanwhile: it must not wait.
        self._memory = RunMemory(sizes, is_within=bool(request.callers) or request.is_step)
        self._statistics = statistics
        self._ended = ended
        self._plan: ExecutionPlan = binding.plan(request.outputs)
        self._calls: dict[StepCall, None] = {}  # calls that may get further answers
        self._first_ns: int | None = None  # time at which the first of many responses was there

    def start(self) -> None:
        """Send the requests of the steps that wait for no other, now or once there is memory for the tensors between the steps.

        Raises:
            InferenceError: a request is refused; the run has ended, and the ensemble's request is not answered through `done`.
        """
        self._request.line = self
        self._binding.begin()
        if self._memory.has_room():
            self._start()
            return
        try:
            self._memory.wait(self._request, self._begin)
        except InferenceError as error:
            self._end()
            self._statistics.failed(self._request.arrived_ns, error)
            raise

    def _begin(self) -> None:
        """Start a run that has waited for memory."""
        now = monotonic()
        if is_late(self._request, now, now):
            self._fail(late_error(self._request, now))
            return
        try:
            self._start()
        except InferenceError as error:
            self._request.finish(error)

    def _start(self) -> None:
        self._memory.claim_expected()
        plan = self._plan
        branch = Branch([NOTHING] * len(plan.waits), plan.waits.copy(), plan.count, _nothing)
        try:
            for index in plan.starts:
                self._call(index, branch, None)
        except Exception as error:
            self._end()
            refusal = error if isinstance(error, InferenceError) else self._unknown(error)
            self._statistics.failed(self._request.arrived_ns, refusal)
            if refusal is error:
                raise
            raise refusal from error

    def cancel(self) -> None:
        """Cancel the steps in progress, because the client has gone."""
        self._end()
        self._statistics.failed(self._request.arrived_ns)

    def answered(self, call: StepCall, result: Tensors | InferenceError) -> None:
        """Take the result of a step that has been computed, has given the last of many responses, or has failed."""
        if call not in self._calls:
            return
        del self._calls[call]
        if call.limit is not None:
            call.leave()
        if isinstance(result, InferenceError):
            call.request = None
            self._fail(self._named(result, call.step.label))
            return
        request, call.request = call.request, None  # the request refers to the call
        if request is not None and request.respond is not None:
            self._release(call.branch)
            call.branch.end()
            if not self._calls:
                self._finish_many()
            return
        call.count(request)
        self._continue(call, call.branch, result, 1 if request is None else request.rows)

    def responded(self, call: StepCall, result: Tensors | InferenceError, read: Callable[[], None], *, final: bool) -> None:
        """Take one of the responses of a decoupled step. `read`: see `InferRequest.respond`."""
        request = call.request
        if call not in self._calls or request is None:
            return
        if isinstance(result, InferenceError):
            self._fail(self._named(result, call.step.label))
            return
        if final:  # done before the following steps, so that the ensemble's last answer is marked as the last
            del self._calls[call]
            call.leave()
            call.request = None
            self._release(call.branch)
            call.branch.end()
        self._continue(call, call.branch.fork(read), result, request.rows)

    def _continue(self, call: StepCall, branch: Branch, answer: Tensors, rows: int) -> None:
        """Continue a branch with the answer of a step, or fail the request."""
        try:
            self._advance(call, branch, answer, rows)
        except InferenceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (the request must be answered, whatever a step's model has answered)
            self._fail(self._unknown(error))

    def _advance(self, call: StepCall, branch: Branch, answer: Tensors, rows: int) -> None:
        """Continue a branch with the answer of a step."""
        plan, index = self._plan, call.step.index
        branch.answers[index] = answer
        branch.left -= 1
        if not branch.left:
            outputs = self._with_sequence(plan.outputs(branch.answers))
            if self._request.respond is None:
                self._finish(outputs, call)
            else:
                self._respond(outputs, branch)
            return
        row_bytes = plan.row_bytes[index]
        size = bytes_of(answer) if row_bytes is None or type(answer) is not Answer else rows * row_bytes
        branch.held += size
        self._memory.hold(size)
        for follower in plan.followers[index]:
            branch.waits[follower] -= 1
            if not branch.waits[follower]:
                self._call(follower, branch, call)

    def _with_sequence(self, outputs: Tensors) -> Tensors:
        """Add the request's sequence parameters to the outputs, as Triton's ensembles do, unless a step has set other ones."""
        given = self._request.parameters
        if not given or not given.get(SEQUENCE_ID):
            return outputs
        sequence = {SEQUENCE_ID: given[SEQUENCE_ID]} | {flag: given.get(flag, False) for flag in (SEQUENCE_START, SEQUENCE_END)}
        own = outputs.parameters if isinstance(outputs, RemarkedAnswer) else NO_PARAMETERS
        return RemarkedAnswer(outputs, sequence | {**own})

    def _respond(self, outputs: Tensors, branch: Branch) -> None:
        request = self._request
        self._release(branch)
        if self._first_ns is None:
            self._first_ns = monotonic_ns()
        is_last = not self._calls
        if request.respond is not None:
            request.respond(outputs, is_last, branch.read)
        if is_last and request.line is self:
            self._finish_many()

    def _release(self, branch: Branch) -> None:
        self._memory.release(branch.held)
        branch.held = 0

    def _call(self, index: int, branch: Branch, before: StepCall | None) -> None:
        call = StepCall(self, self._binding.steps[index], branch, before)
        if self._limits is None:
            self._send(call)
        elif self._request.line is self:  # an earlier step may have failed at once
            self._calls[call] = None
            self._limits[index].enter(call.send)

    def admitted(self, call: StepCall) -> bool:
        """Send the request of a call for which the limit of its step has room; returns False if this run has ended."""
        if call not in self._calls or self._limits is None:
            return False
        call.limit = self._limits[call.step.index]
        try:
            self._send(call)
        except InferenceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (the request must be answered, whatever a step's model has answered)
            self._fail(self._unknown(error))
        return True

    def _send(self, call: StepCall) -> None:
        step, branch = call.step, call.branch
        request = step.request(self._request, branch.answers, self._plan.asked[step.index], call)
        if request.callers:
            request.callers = (*request.callers, self._binding.caller)
        request.is_step = True
        if step.model.is_decoupled:
            request.respond = call.respond
        call.request = request
        self._calls[call] = None
        try:
            step.model.scheduler.submit(request)
        except InferenceError as error:
            call.request = None  # before the call leaves the limit, which may send another one
            self._calls.pop(call, None)
            call.leave()
            raise self._named(error, step.label) from None

    def _named(self, error: InferenceError, label: str) -> InferenceError:
        return named(error, label, self._binding.caller.label.partition("/")[0])

    def _finish(self, outputs: Tensors, last: StepCall) -> None:
        request = self._request
        split = monotonic_ns()
        computed = split - last.output_ns
        assembled = computed - last.infer_ns
        started = max(request.arrived_ns, assembled - last.input_ns)
        self._succeed(BatchTimes(started=started, assembled=assembled, computed=computed, split=split), outputs)

    def _finish_many(self) -> None:
        now, arrived = monotonic_ns(), self._request.arrived_ns
        self._succeed(BatchTimes(started=arrived, assembled=arrived, computed=self._first_ns or now, split=now), NOTHING)

    def _succeed(self, times: BatchTimes, outputs: Tensors) -> None:
        request = self._request
        self._memory.record()
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
        """Cancel the steps in progress, and release the models."""
        calls, self._calls = self._calls, {}
        for call in calls:
            if call.request is not None:
                call.step.model.scheduler.cancel(call.request)
                call.request = None
            if call.limit is not None:
                call.leave()
        self._request.line = None
        self._memory.leave()
        self._binding.end()
        self._ended()

    def _unknown(self, error: Exception) -> InferenceError:
        if is_out_of_memory(error):  # as large requests can make it
            logger.error("a step of an ensemble cannot be computed: memory ran out")
            return OutOfMemoryError()
        logger.error("a step of an ensemble answered what its model does not declare", exc_info=error)
        return BackendError(f"a step answered what its model does not declare: {type(error).__name__}")


class EnsembleScheduler:
    """Takes the requests of an ensemble. Lives on the event loop."""

    def __init__(self, composition: EnsembleComposition, statistics: Statistics) -> None:
        self._composition = composition
        self._statistics = statistics
        graph = composition.graph
        self._limits = [StepLimit(graph.max_in_flight) for _ in graph.steps] if graph.max_in_flight else None
        self._in_flight = 0
        self._is_draining = False
        self._idle = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return not self._in_flight

    def submit(self, request: InferRequest) -> None:
        """Begin a request; see `Scheduler.submit`.

        Raises:
            UnavailableError: the ensemble is draining, or a step's model is not served or does not fit.
            UnsupportedError: a step is decoupled, and the request takes one response.
            QueueFullError: too many requests wait for memory for their tensors between the steps.
            InferenceError: the model of a first step refuses its request.
        """
        composition, binding = self._composition, self._composition.binding
        if self._is_draining or binding is None:
            away = UnavailableError(SHUTTING_DOWN) if self._is_draining else self._unbound()
            self._statistics.failed(request.arrived_ns, away)
            raise away
        if composition.is_decoupled:
            require_many(request, composition.graph.name)
        run = EnsembleRun(request, binding, composition.sizes, self._statistics, self._ended, self._limits)
        self._in_flight += 1
        run.start()

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone: steps in progress are cancelled, further ones are not computed."""
        request.cancelled = True
        if isinstance(request.line, EnsembleRun):
            request.line.cancel()

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and release the steps' models."""
        self._is_draining = True
        while self._in_flight:
            self._idle.clear()
            await self._idle.wait()
        self._composition.disconnect()

    def _ended(self) -> None:
        self._in_flight -= 1
        if not self._in_flight and self._is_draining:
            self._idle.set()

    def _unbound(self) -> UnavailableError:
        return UnavailableError(f"the ensemble cannot be computed now: {self._composition.own_fault}", retry_after_s=RETRY_S)
