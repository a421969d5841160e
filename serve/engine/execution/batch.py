"""Runs one batch on a backend: assembles the inputs of its requests, computes, and splits the outputs. For worker threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.errors import BackendError, InferenceError, InstanceLostError, is_device_lost
from halfserve.serve.engine.execution.assembly import GatheredBatch, assemble, gather
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance, dependent_output
from halfserve.serve.engine.execution.memory_limit import MemoryLimit
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.padding.padding import Padding
from halfserve.serve.engine.padding.ragged import Ragged
from halfserve.serve.engine.precision_guard.guard import GuardVerdict, PrecisionGuard
from halfserve.serve.engine.requests import Answer, BatchOutputs, InferRequest, RemarkedAnswer
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)


class _NoRowsError(Exception):
    """The outputs have another number of rows than the inputs."""


def may_share(backend: Backend, requests: list[InferRequest], invariance: BatchInvariance) -> bool:
    """Return whether two or more requests may be computed together, by computing two of them alone and together.

    Equal rows may not reveal a dependence: they may share batches if the comparison finds none, and it is repeated with the
    first requests that differ.

    Raises:
        InstanceLostError: this copy of the model is broken.
    """

    def run(inputs: Tensors) -> Tensors:
        rows = len(next(iter(inputs.values())))
        outputs = {name: array.copy() for name, array in backend.run(inputs).items()}  # the next run may reuse the memory
        if any(array.shape[:1] != (rows,) for array in outputs.values()):
            raise _NoRowsError
        return outputs

    try:
        first = _inputs(backend, requests[0])
        for request in requests[1:]:
            beside = _inputs(backend, request)
            if differed := not _are_same(first, beside):
                break
        if not differed and invariance.same_may_share:
            return True
        together = {name: np.concatenate([array, beside[name]]) for name, array in first.items()}
        mixed = dependent_output(run, first, beside, together)
    except Exception as error:
        if is_device_lost(error):
            raise InstanceLostError(str(error)) from error
        return False  # computing each alone shows which one failed
    invariance.looked(mixed, differed=differed)
    return mixed is None


def _inputs(backend: Backend, request: InferRequest) -> Tensors:
    # The arrays are copied because the buffers are reused for the next request.
    return {name: assemble([request], name, backend.compute_dtype(name)).copy() for name in request.inputs}


def _are_same(ones: Tensors, others: Tensors) -> bool:
    return all(np.array_equal(array, others[name]) for name, array in ones.items())


def run_batch(
    backend: Backend,
    requests: list[InferRequest],
    guard: PrecisionGuard | None = None,
    *,
    memory: MemoryLimit | None = None,
    padded_sizes: Sequence[int] = (),
    invariance: BatchInvariance | None = None,
    padding: Padding | None = None,
    ragged: Ragged | None = None,
    gathered: GatheredBatch | None = None,
) -> list[Answered | Failed]:
    """Run requests together; if that fails, bisect until only the requests that cannot be computed have failed.

    Args:
        backend: computes the batch.
        requests: requests of one bucket, or of several that `padding` unites.
        guard: checks the outputs.
        memory: computes in pieces if memory runs out; None lets the batch fail.
        padded_sizes: numbers of rows that a batch is padded to, in rising order.
        invariance: decides whether they may be computed together; None if they may, or if there is one request.
        padding: pads requests of different lengths.
        ragged: joins requests of different shapes, which are neither padded nor guarded.
        gathered: the requests as `gather` has joined them; None joins them here.

    Raises:
        InstanceLostError: this copy of the model is broken; none of the requests has an answer.
    """
    if len(requests) > 1 and invariance is not None and invariance.is_doubtful and not may_share(backend, requests, invariance):
        # The requests are not padded either, because padded rows are other rows too.
        apart = [run_batch(backend, [one], guard, memory=memory, invariance=invariance) for one in requests]
        return [result for results in apart for result in results]

    def together(some: list[InferRequest]) -> list[Answered | Failed]:
        ready = gathered if some is requests else None
        if ragged is not None:
            return _run_ragged(backend, some, ragged, ready)
        return _run_together(backend, some, guard, memory, padded_sizes, invariance, padding, ready)

    return _isolate(together, requests, invariance, one_is_bad=False)


def _isolate(
    together: Callable[[list[InferRequest]], list[Answered | Failed]],
    requests: list[InferRequest],
    invariance: BatchInvariance | None,
    *,
    one_is_bad: bool,
) -> list[Answered | Failed]:
    # A request of this batch may just have shown that sharing is unsafe.
    if len(requests) > 1 and invariance is not None and not invariance.is_safe:
        return [result for request in requests for result in _isolate(together, [request], invariance, one_is_bad=False)]
    if not one_is_bad or len(requests) == 1:
        try:
            return together(requests)
        except Exception as error:
            if len(requests) == 1:
                return [failed(requests[0], error)]
            if is_device_lost(error):
                raise InstanceLostError(str(error)) from error
    middle = len(requests) // 2
    left = _isolate(together, requests[:middle], invariance, one_is_bad=False)
    # If the left half succeeds, the right half fails as a whole: bisect it without running it.
    left_is_good = not any(isinstance(result, Failed) for result in left)
    return left + _isolate(together, requests[middle:], invariance, one_is_bad=left_is_good)


def failed(request: InferRequest, error: Exception) -> Failed:
    """Return the result of a request that ended with `error` when it was computed alone.

    Raises:
        InstanceLostError: the device is lost, which is not the request's fault.
    """
    if is_device_lost(error):
        raise InstanceLostError(str(error)) from error
    _forget_frames(error)
    if isinstance(error, InferenceError):
        return Failed(request, error)
    known = BackendError(f"the model failed on this request: {error}")
    known.__cause__ = error
    return Failed(request, known)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and its causes, which hold the batch, and with it the error, until the garbage collector
    runs.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _run_together(
    backend: Backend,
    requests: list[InferRequest],
    guard: PrecisionGuard | None,
    memory: MemoryLimit | None,
    padded_sizes: Sequence[int],
    invariance: BatchInvariance | None,
    padding: Padding | None,
    gathered: GatheredBatch | None = None,
) -> list[Answered | Failed]:
    is_unsafe = invariance is not None and not invariance.is_safe  # requests of an unsafe model are neither padded nor split
    if gathered is None:
        gathered = gather(backend, requests) if is_unsafe else gather(backend, requests, padded_sizes, padding)
    inputs, rows, length = gathered.inputs, gathered.rows, gathered.length
    assembled = time.monotonic_ns()
    outputs = backend.run(inputs) if memory is None else memory.run(backend, inputs, 1 if is_unsafe else rows)
    computed = time.monotonic_ns()
    if invariance is not None and not is_unsafe and len(requests) == 1:
        invariance.look(outputs, rows)
        if not invariance.is_safe:
            return _run_together(backend, requests, guard, memory, padded_sizes, invariance, padding)
    verdict = None if guard is None else guard.after(requests, inputs, outputs)
    if verdict is not None:
        outputs = verdict.outputs
    if padding is None or not length:
        answers = take_apart(outputs, requests, rows)
    else:
        answers = padding.answers(outputs, requests, rows, length)
    times = BatchTimes(started=gathered.started, assembled=assembled, computed=computed, split=time.monotonic_ns())
    return [Answered(requests, answers, times)] if verdict is None else judged(verdict, requests, answers, times)


def _run_ragged(
    backend: Backend, requests: list[InferRequest], ragged: Ragged, gathered: GatheredBatch | None
) -> list[Answered | Failed]:
    if gathered is None:
        gathered = gather(backend, requests, ragged=ragged)
    assembled = time.monotonic_ns()
    outputs = backend.run(gathered.inputs)
    computed = time.monotonic_ns()
    answers = ragged.answers(outputs, requests)
    times = BatchTimes(started=gathered.started, assembled=assembled, computed=computed, split=time.monotonic_ns())
    return [Answered(requests, answers, times)]


def judged(
    verdict: GuardVerdict, requests: list[InferRequest], answers: list[Tensors], times: BatchTimes
) -> list[Answered | Failed]:
    """Return the results of a batch that the guard changes."""
    results: list[Answered | Failed] = [Failed(requests[index], error) for index, error in verdict.rejected.items()]
    kept = [index for index in range(len(requests)) if index not in verdict.rejected]
    if kept:
        remarked = [_remarked(requests[index], answers[index]) for index in kept]
        results.append(Answered([requests[index] for index in kept], remarked, times))
    return results


def _remarked(request: InferRequest, answer: Tensors) -> Tensors:
    parameters = request.response_parameters
    return answer if parameters is None else RemarkedAnswer(answer, parameters)


def take_apart(outputs: Tensors, requests: list[InferRequest], rows: int) -> list[Tensors]:
    if len(requests) == 1 and rows == requests[0].rows:
        request = requests[0]
        if any(not array.ndim or len(array) != rows for array in outputs.values()):
            return [{name: outputs[name] for name in request.outputs}]
        return [Answer(BatchOutputs(outputs), request.outputs, 0, rows)]
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != rows:
            raise BackendError(
                f"output {name!r} has shape {list(array.shape)}, expected {rows} rows first, one per row of the batch"
            )
    batch = BatchOutputs(outputs)
    answers: list[Tensors] = []
    start = 0
    for request in requests:
        end = start + request.rows
        answers.append(Answer(batch, request.outputs, start, end))
        start = end
    return answers
