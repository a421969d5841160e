"""Runs a batch on a backend that takes whole requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from halfserve.serve.engine.backend import Outcome, RequestBackend, Reschedule
from halfserve.serve.engine.errors import BackendError, InferenceError, InstanceLostError, OutOfMemoryError, is_out_of_memory
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.results import Answered, Failed, LaterAnswer, PendingAnswers, Rescheduled
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)


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
