"""The copies of a model, by the kind of its backend, and the runner of backends that take whole requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from halfserve.serve.engine.backend import Backend, Outcome, RequestBackend, Reschedule
from halfserve.serve.engine.errors import BackendError, InferenceError, InstanceLostError, OutOfMemoryError, is_out_of_memory
from halfserve.serve.engine.execution.batch_runner import BatchRunner, PreparedBatch, lost
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.execution.memory_limit import MemoryLimit
from halfserve.serve.engine.execution.staging import Staging
from halfserve.serve.engine.execution.tensor_runner import FailureLog, Supervision, TensorRunner
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.requests import CallingExecution, InferRequest
from halfserve.serve.engine.results import Answered, BegunBatch, Failed, LaterAnswer, PendingAnswers, Rescheduled, Results
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)


def make_instance(backend: Backend, number: int, how: Supervision) -> Instance:
    """Return the instance of a model that runs on the copy of a number."""
    name = f"{how.label} instance {number}"
    runner = _runner(backend, number, how)
    return Instance(name, runner, number, max_compute_s=how.max_compute_s, first_wait_s=how.first_wait_s)


def _runner(backend: Backend, number: int, how: Supervision) -> BatchRunner:
    if isinstance(backend, RequestBackend):
        return RequestRunner(backend, number, how)
    name = f"{how.label} instance {number}"
    return TensorRunner(backend, number, how, MemoryLimit(name), FailureLog(name), Staging(f"staging-{number}"))


class RequestRunner(BatchRunner):
    """Passes whole requests to a backend, which may begin them on the event loop."""

    def __init__(self, backend: RequestBackend, number: int, how: Supervision) -> None:
        super().__init__(has_process=True, may_run_on_loop=how.may_run_on_loop(backend.provider))
        self.backend = backend
        self._number = number
        self._how = how

    @property
    def caller(self) -> CallingExecution | None:
        return self.backend.caller

    @property
    def can_reload(self) -> bool:
        return self._how.reload is not None

    async def is_ready(self) -> bool:
        return await self.backend.is_ready()

    def begin(self, requests: list[InferRequest], batch: BegunBatch) -> bool:
        return self.backend.begin(requests, batch)

    def let_go(self) -> None:
        self.backend.let_go()

    def reloaded(self) -> BatchRunner:
        how, number = self._how, self._number
        return RequestRunner(self.backend, number, how) if how.reload is None else _runner(how.reload(number), number, how)

    def give_up(self) -> None:
        self.backend.give_up()

    def close(self) -> None:
        self.backend.close()

    def run(self, requests: list[InferRequest], prepared: PreparedBatch | None = None, begun_ns: int = 0) -> Results:  # noqa: ARG002  (of tensors)
        if self.is_broken and not begun_ns:
            return lost(requests)
        try:
            return run_requests(self.backend, requests, begun_ns or time.monotonic_ns())
        except InstanceLostError as error:
            return self.broken(requests, error)


def run_requests(
    backend: RequestBackend, requests: list[InferRequest], started: int
) -> list[Answered | Failed | PendingAnswers | Rescheduled]:
    """Have a backend answer requests, which it may have begun at `started` (`time.monotonic_ns`).

    Raises:
        InstanceLostError: this copy of the model is broken; none of the requests has an answer.
    """
    given = _computed(backend, requests)
    computed = time.monotonic_ns()
    results: list[Answered | Failed | PendingAnswers | Rescheduled] = []
    answered: list[InferRequest] = []
    answers: list[Tensors] = []
    later: list[tuple[InferRequest, LaterAnswer]] = []
    again: list[InferRequest] = []
    for request, answer in zip(requests, given, strict=True):
        if answer is None:
            continue
        if isinstance(answer, LaterAnswer):
            later.append((request, answer))
        elif isinstance(answer, Reschedule):
            again.append(request)
        elif isinstance(answer, InferenceError):
            results.append(Failed(request, answer))
        else:
            answered.append(request)
            answers.append(answer)
    times = BatchTimes(started=started, assembled=started, computed=computed, split=time.monotonic_ns())
    if answered:
        results.insert(0, Answered(answered, answers, times))
    if again:
        results.append(Rescheduled(again))
    if later or not results:
        results.append(PendingAnswers(later, times))
    return results


def _computed(backend: RequestBackend, requests: list[InferRequest]) -> Sequence[Outcome]:
    try:
        return backend.compute(requests)
    except InstanceLostError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # as large requests can make it
            logger.error("a batch of requests could not be computed: memory ran out")  # noqa: TRY400  (the cause is known)
            return [OutOfMemoryError()] * len(requests)
        logger.exception("a batch of requests could not be computed")
        return [BackendError(f"the model failed on this request: {error}")] * len(requests)
