"""Run one batch on a backend: put the requests' rows together, compute, take the answers apart. Runs on a worker thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve.engine.backend import Backend
from serve.engine.batches.answer import Answer, BatchOutputs, RemarkedAnswer
from serve.engine.batches.assembly import assemble
from serve.engine.batches.first_look import may_share
from serve.engine.batches.memory_limit import MemoryLimit
from serve.engine.device_faults import InstanceLostError, is_device_lost
from serve.engine.errors import BackendError, InferenceError
from serve.engine.figures.statistics import BatchTimes
from serve.engine.precision_guard.guard import PrecisionGuard, Verdict
from serve.engine.queueing.joining import Joining
from serve.engine.queueing.padding import pad_rows, padded_rows
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors


@dataclass(frozen=True)
class Answered:
    """Requests that ran together.

    Attributes:
        requests: in order of arrival.
        answers: one per request.
        times: of the batch.
    """

    requests: list[InferRequest]
    answers: list[Tensors]
    times: BatchTimes


@dataclass(frozen=True)
class Failed:
    """A request that could not be computed, not even alone."""

    request: InferRequest
    error: InferenceError


def run_batch(
    backend: Backend,
    requests: list[InferRequest],
    guard: PrecisionGuard | None = None,
    *,
    memory: MemoryLimit | None = None,
    padded_sizes: Sequence[int] = (),
    joining: Joining | None = None,
) -> list[Answered | Failed]:
    """Run the requests together; when that fails, halve until only the requests that cannot be computed have failed.

    Args:
        backend: computes.
        requests: of one bucket.
        guard: looks at the outputs; None does not.
        memory: computes in pieces where memory runs out; None lets that fail as all else does.
        padded_sizes: rows that a batch is filled up to, in rising order.
        joining: whether they may run together; None trusts that they may, or that there is one.

    Raises:
        InstanceLostError: this copy of the model will not compute any more; none of the requests has an answer.
    """
    if len(requests) > 1 and joining is not None and joining.is_doubtful and not may_share(backend, requests, joining):
        apart = [run_batch(backend, [one], guard, memory=memory, joining=joining) for one in requests]  # not filled up either
        return [result for results in apart for result in results]

    def together(some: list[InferRequest]) -> list[Answered | Failed]:
        return _run_together(backend, some, guard, memory, padded_sizes, joining)

    return _isolate(together, requests, joining, one_is_bad=False)


def _isolate(
    together: Callable[[list[InferRequest]], list[Answered | Failed]],
    requests: list[InferRequest],
    joining: Joining | None,
    *,
    one_is_bad: bool,
) -> list[Answered | Failed]:
    if len(requests) > 1 and joining is not None and not joining.is_safe:  # which one of them may have shown just now
        return [result for request in requests for result in _isolate(together, [request], joining, one_is_bad=False)]
    if not one_is_bad or len(requests) == 1:
        try:
            return together(requests)
        except Exception as error:
            if is_device_lost(error):
                raise InstanceLostError(str(error)) from error
            if len(requests) == 1:
                known = (
                    error if isinstance(error, InferenceError) else BackendError(f"the model failed on this request: {error}")
                )
                return [Failed(requests[0], known)]
    middle = len(requests) // 2
    left = _isolate(together, requests[:middle], joining, one_is_bad=False)
    # What failed together and is not on the left is on the right: that need not be run whole to see it fail.
    left_is_good = not any(isinstance(result, Failed) for result in left)
    return left + _isolate(together, requests[middle:], joining, one_is_bad=left_is_good)


def _run_together(
    backend: Backend,
    requests: list[InferRequest],
    guard: PrecisionGuard | None,
    memory: MemoryLimit | None,
    padded_sizes: Sequence[int],
    joining: Joining | None,
) -> list[Answered | Failed]:
    as_it_is = joining is not None and not joining.is_safe  # a request that can be joined with none is not filled up or cut
    started = time.monotonic_ns()
    rows = requests[0].rows if len(requests) == 1 else sum([request.rows for request in requests])
    if padded_sizes and not as_it_is:
        rows = padded_rows(rows, padded_sizes)
    inputs: Tensors = {name: assemble(requests, name, backend.compute_dtype(name), rows) for name in requests[0].inputs}
    if padded_sizes and not as_it_is:
        inputs = {name: pad_rows(array, rows) for name, array in inputs.items()}
    assembled = time.monotonic_ns()
    outputs = backend.run(inputs) if memory is None else memory.run(backend, inputs, 1 if as_it_is else rows)
    computed = time.monotonic_ns()
    if joining is not None and not as_it_is and len(requests) == 1:
        joining.look(outputs, rows)
        if not joining.is_safe:
            return _run_together(backend, requests, guard, memory, padded_sizes, joining)
    verdict = None if guard is None else guard.after(requests, inputs, outputs)
    answers = _take_apart(outputs if verdict is None else verdict.outputs, requests, rows)
    times = BatchTimes(started=started, assembled=assembled, computed=computed, split=time.monotonic_ns())
    return [Answered(requests, answers, times)] if verdict is None else _judged(verdict, requests, answers, times)


def _judged(
    verdict: Verdict, requests: list[InferRequest], answers: list[Tensors], times: BatchTimes
) -> list[Answered | Failed]:
    """What becomes of a batch that the guard wants changed."""
    results: list[Answered | Failed] = [Failed(requests[index], error) for index, error in verdict.rejected.items()]
    kept = [index for index in range(len(requests)) if index not in verdict.rejected]
    if kept:
        remarked = [_remarked(requests[index], answers[index]) for index in kept]
        results.append(Answered([requests[index] for index in kept], remarked, times))
    return results


def _remarked(request: InferRequest, answer: Tensors) -> Tensors:
    parameters = request.response_parameters
    return answer if parameters is None else RemarkedAnswer(answer, parameters)


def _take_apart(outputs: Tensors, requests: list[InferRequest], rows: int) -> list[Tensors]:
    if len(requests) == 1 and rows == requests[0].rows:
        request = requests[0]
        return [{name: outputs[name] for name in request.outputs}]
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
