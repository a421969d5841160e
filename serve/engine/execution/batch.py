"""Run one batch on a backend: assemble the inputs of its requests, compute, split the outputs. Runs on a worker thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.cuda_driver import Buffer, batch_buffer
from halfserve.serve.engine.errors import (
    BackendError,
    InferenceError,
    InstanceLostError,
    OutOfMemoryError,
    is_device_lost,
    is_out_of_memory,
)
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance, dependent_output
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.padding import Padding
from halfserve.serve.engine.precision_guard.guard import GuardVerdict, PrecisionGuard
from halfserve.serve.engine.queueing.pace import padded_rows
from halfserve.serve.engine.ragged import Ragged
from halfserve.serve.engine.requests import Answer, BatchOutputs, InferRequest, RawInputs, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)


FIRST_WAIT_S: Final = 10.0
LONGEST_WAIT_S: Final = 600.0
# From this size on, fresh memory costs more than the copy into it, by its page faults.
SCRATCH_BYTES: Final = 65_536


class MemoryLimit:
    """How many rows one copy of a model computes at once. Used by one thread at a time.

    The limit halves when memory runs out and doubles after a wait, until it is as large as what failed first. When it fails
    again soon after it has grown, the wait doubles.
    """

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._clock = clock
        self._rows: int | None = None
        self._enough = 0  # the limit is dropped when it reaches these rows
        self._wait_s = FIRST_WAIT_S
        self._changed_at = 0.0
        self._grew = False  # at the last change

    @property
    def rows(self) -> int | None:
        """The current limit; None is no limit."""
        return self._rows

    def run(self, backend: Backend, inputs: Tensors, rows: int) -> Tensors:
        """Compute a batch of `rows` rows, in pieces where the limit or the memory asks for it.

        Raises:
            OutOfMemoryError: not even one row can be computed.
            Exception: any other error of the runtime.
        """
        failed: list[int] = []
        while True:
            size = self._most(rows) if not failed else failed[-1] // 2
            try:
                outputs = backend.run(inputs) if size >= rows else _in_pieces(backend, inputs, rows, size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1:
                    # This request asks for too much. The limit for others stays.
                    raise OutOfMemoryError from error
                failed.append(size)
            else:
                if failed:
                    self._shrink(failed, size)
                return outputs

    def _shrink(self, failed: Sequence[int], fits: int) -> None:
        now = self._clock()
        if self._grew:
            too_soon = now < self._changed_at + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S) if too_soon else FIRST_WAIT_S
        if self._rows is None:
            self._enough = failed[0]
        self._rows, self._changed_at, self._grew = fits, now, False
        logger.warning(
            "%s: out of memory with %d rows at once; it computes at most %d now, and tries more in %g s",
            self._label,
            failed[-1],
            fits,
            self._wait_s,
        )

    def _most(self, rows: int) -> int:
        return rows if self._rows is None else self._grown(self._rows, rows)

    def _grown(self, limit: int, rows: int) -> int:
        """The limit for a batch of `rows` rows, doubled where the wait is over."""
        now = self._clock()
        if limit < rows and now >= self._changed_at + self._wait_s:
            limit *= 2
            self._changed_at, self._grew = now, True
            self._rows = limit if limit < self._enough else None
            if self._rows is None:
                logger.info("%s: it computes batches of any size again", self._label)
        return min(limit, rows)


def _in_pieces(backend: Backend, inputs: Tensors, rows: int, size: int) -> Tensors:
    pieces = [
        backend.run({name: array[start : start + size] for name, array in inputs.items()}) for start in range(0, rows, size)
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def assemble(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any], padded: int = 0) -> Array:
    """One input of a batch.

    Args:
        requests: of one bucket, in order.
        name: the input's.
        dtype: in which the backend takes it.
        padded: rows that the batch is going to be padded to; see `pad_rows`.

    Returns:
        All rows, and the padding where that costs no copy. The memory may be the request's own, where there is only one, or be
        reused by this thread's next batch.

    Raises:
        InferenceError: bytes in shared memory cannot be fetched.
    """
    first = requests[0].inputs
    if type(first) is not RawInputs:
        return _concatenated(requests, name, dtype)
    if len(requests) == 1:
        if first.size(name) >= SCRATCH_BYTES and (padded > requests[0].rows or not first.has_aligned(name)):
            return _gathered([first], name, requests[0].rows, dtype, padded)
        # A view on received bytes may be unaligned, and runtimes may not take such pointers.
        part = first[name]
        return part.astype(dtype, copy=not part.flags.aligned)
    sources = [request.inputs for request in requests if type(request.inputs) is RawInputs]
    if len(sources) != len(requests):
        return _concatenated(requests, name, dtype)
    rows = sum([request.rows for request in requests])
    if first.size(name) * len(requests) >= SCRATCH_BYTES:
        return _gathered(sources, name, rows, dtype, padded)
    entry = first.layout.inputs[first.layout.places[name]]
    joined = b"".join([source.piece(name) for source in sources])
    return np.frombuffer(joined, entry.dtype).reshape(rows, *entry.shape[1:]).astype(dtype, copy=False)


def _concatenated(requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any]) -> Array:
    if len(requests) == 1:
        part = requests[0].inputs[name]
        return part.astype(dtype, copy=not part.flags.aligned)
    return np.concatenate([request.inputs[name] for request in requests], dtype=dtype, casting="unsafe")


def _gathered(sources: Sequence[RawInputs], name: str, rows: int, dtype: np.dtype[Any], padded: int) -> Array:
    entry = sources[0].layout.inputs[sources[0].layout.places[name]]
    sizes = [source.size(name) for source in sources]
    total = sum(sizes)
    row_bytes, added = (total // rows, padded - rows) if padded > rows else (0, 0)
    buffer = _scratch().of(name, total + added * row_bytes)
    view, start = buffer.data, 0
    for source, size in zip(sources, sizes, strict=True):
        source.copy_into(name, view[start : start + size])
        start += size
    if added:
        buffer[total : total + added * row_bytes].reshape(added, row_bytes)[:] = buffer[total - row_bytes : total]
    shape = (rows + added, *entry.shape[1:]) if len(sources) > 1 or added else entry.shape
    return buffer[: total + added * row_bytes].view(entry.dtype).reshape(shape).astype(dtype, copy=False)


def assemble_padded(
    requests: Sequence[InferRequest], name: str, dtype: np.dtype[Any], rows: int, length: int, padding: Padding
) -> Array:
    """One padded input of a batch of requests of different lengths, in one copy.

    Args:
        requests: of one family of buckets, in order.
        name: the input's.
        dtype: in which the backend takes it.
        rows: of the batch; those beyond the requests' repeat the last one.
        length: to which the requests are padded.
        padding: says which axes, and the value.

    Returns:
        All rows. The memory may be reused by this thread's next batch.

    Raises:
        InferenceError: bytes in shared memory cannot be fetched.
    """
    padded = padding.inputs[name]
    arrays = [request.inputs[name] for request in requests]
    shape = [rows, *arrays[0].shape[1:]]
    for axis in padded.axes:
        shape[axis] = length
    batch = _empty(name, tuple(shape), dtype)
    start = 0
    for array in arrays:
        end = start + array.shape[0]
        place = [slice(start, end)] + [slice(None)] * (array.ndim - 1)
        if array.shape[padded.axes[0]] != length:
            batch[start:end] = padded.value
            for axis in padded.axes:
                place[axis] = slice(array.shape[axis])
        batch[tuple(place)] = array
        start = end
    if start < rows:
        batch[start:] = batch[start - 1]
    return batch


def _empty(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    if size < SCRATCH_BYTES:
        return np.empty(shape, dtype)
    return _scratch().of(name, size)[:size].view(dtype).reshape(shape)


def lock_buffers(device_id: int) -> None:
    """Page-lock the buffers that this thread makes from now on, where possible, for copies to a CUDA device."""
    _scratch().device_id = device_id


class _Scratch:
    """A thread's buffers, by input. Each is as large as the largest batch so far."""

    def __init__(self) -> None:
        self.device_id: int | None = None
        self._buffers: dict[tuple[str, int | None], Buffer] = {}

    def of(self, name: str, size: int) -> Buffer:
        """A buffer of at least `size` bytes."""
        key = (name, self.device_id)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[key] = self._new(name, size)
        return buffer

    def _new(self, name: str, size: int) -> Buffer:
        if self.device_id is None:
            return np.empty(size, np.uint8)
        self._buffers.pop((name, None), None)  # made before the first batch was on the device
        return batch_buffer(size, self.device_id)


_of_thread: Final = threading.local()  # holds a _Scratch


def _scratch() -> _Scratch:
    scratch: _Scratch | None = getattr(_of_thread, "scratch", None)
    if scratch is None:
        scratch = _of_thread.scratch = _Scratch()
    return scratch


def pad_rows(array: Array, rows: int) -> Array:
    """Pad one input to `rows` rows by repeating its last row.

    Unlike zeros, that row is valid for the model (an index into a table, a mask with an element), and cannot make non-finite
    values.

    Args:
        array: [n, ...] with 1 <= n <= rows.
        rows: wanted.

    Returns:
        [rows, ...]; the array itself where n = rows.
    """
    missing = rows - array.shape[0]
    if missing <= 0:
        return array
    return np.concatenate([array, np.broadcast_to(array[-1:], (missing, *array.shape[1:]))])


class _NoRowsError(Exception):
    """The outputs do not have the rows of the inputs."""


def may_share(backend: Backend, requests: list[InferRequest], invariance: BatchInvariance) -> bool:
    """Whether these requests, two at least, may be computed together, from what two of them get alone and together.

    Equal rows may show nothing: they may share once they have shown nothing, and the comparison is repeated with the first
    requests that differ.

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
    # Copies: the buffers are reused for the next request.
    return {name: assemble([request], name, backend.compute_dtype(name)).copy() for name in request.inputs}


def _are_same(ones: Tensors, others: Tensors) -> bool:
    return all(np.array_equal(array, others[name]) for name, array in ones.items())


class Answered:
    """Requests that ran together.

    Attributes:
        requests: in order of arrival.
        answers: one per request.
        times: of the batch.
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
) -> list[Answered | Failed]:
    """Run requests together; when that fails, bisect until only the requests that cannot be computed have failed.

    Args:
        backend: computes.
        requests: of one bucket, or of several that `padding` makes one.
        guard: checks the outputs.
        memory: computes in pieces where memory runs out; None fails.
        padded_sizes: rows that a batch is padded to, in rising order.
        invariance: whether they may run together; None: they may, or there is one request.
        padding: pads requests of different lengths.
        ragged: joins requests of different shapes; they are neither padded nor guarded.

    Raises:
        InstanceLostError: this copy of the model is broken; none of the requests has an answer.
    """
    if len(requests) > 1 and invariance is not None and invariance.is_doubtful and not may_share(backend, requests, invariance):
        # Without padding: padded rows are other rows too.
        apart = [run_batch(backend, [one], guard, memory=memory, invariance=invariance) for one in requests]
        return [result for results in apart for result in results]

    def together(some: list[InferRequest]) -> list[Answered | Failed]:
        if ragged is not None:
            return _run_ragged(backend, some, ragged)
        return _run_together(backend, some, guard, memory, padded_sizes, invariance, padding)

    return _isolate(together, requests, invariance, one_is_bad=False)


def _isolate(
    together: Callable[[list[InferRequest]], list[Answered | Failed]],
    requests: list[InferRequest],
    invariance: BatchInvariance | None,
    *,
    one_is_bad: bool,
) -> list[Answered | Failed]:
    # A request of this batch may just have shown that it is not safe.
    if len(requests) > 1 and invariance is not None and not invariance.is_safe:
        return [result for request in requests for result in _isolate(together, [request], invariance, one_is_bad=False)]
    if not one_is_bad or len(requests) == 1:
        try:
            return together(requests)
        except Exception as error:
            if is_device_lost(error):
                raise InstanceLostError(str(error)) from error
            if len(requests) == 1:
                if isinstance(error, InferenceError):
                    return [Failed(requests[0], error)]
                known = BackendError(f"the model failed on this request: {error}")
                known.__cause__ = error
                return [Failed(requests[0], known)]
    middle = len(requests) // 2
    left = _isolate(together, requests[:middle], invariance, one_is_bad=False)
    # If the left half is good, the right half fails as a whole: bisect it without running it.
    left_is_good = not any(isinstance(result, Failed) for result in left)
    return left + _isolate(together, requests[middle:], invariance, one_is_bad=left_is_good)


def _run_together(
    backend: Backend,
    requests: list[InferRequest],
    guard: PrecisionGuard | None,
    memory: MemoryLimit | None,
    padded_sizes: Sequence[int],
    invariance: BatchInvariance | None,
    padding: Padding | None,
) -> list[Answered | Failed]:
    is_unsafe = invariance is not None and not invariance.is_safe  # such requests are neither padded nor split
    started = time.monotonic_ns()
    rows = requests[0].rows if len(requests) == 1 else sum([request.rows for request in requests])
    if padded_sizes and not is_unsafe:
        rows = padded_rows(rows, padded_sizes)
    length = 0 if padding is None or is_unsafe else padding.common_length(requests)
    inputs: Tensors
    if padding is None or not length:
        inputs = {name: assemble(requests, name, backend.compute_dtype(name), rows) for name in requests[0].inputs}
    else:
        inputs = padded_inputs(backend, requests, rows, length, padding)
    if padded_sizes and not is_unsafe:
        inputs = {name: pad_rows(array, rows) for name, array in inputs.items()}
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
        answers = _take_apart(outputs, requests, rows)
    else:
        answers = padding.answers(outputs, requests, rows, length)
    times = BatchTimes(started=started, assembled=assembled, computed=computed, split=time.monotonic_ns())
    return [Answered(requests, answers, times)] if verdict is None else _judged(verdict, requests, answers, times)


def _run_ragged(backend: Backend, requests: list[InferRequest], ragged: Ragged) -> list[Answered | Failed]:
    started = time.monotonic_ns()
    inputs: dict[str, Array] = {}
    for name in requests[0].inputs:
        dtype = backend.compute_dtype(name)
        inputs[name] = ragged.joined(requests, name, dtype) if name in ragged.inputs else assemble(requests, name, dtype)
    inputs.update(ragged.made_inputs(requests))
    assembled = time.monotonic_ns()
    outputs = backend.run(inputs)
    computed = time.monotonic_ns()
    answers = ragged.answers(outputs, requests)
    times = BatchTimes(started=started, assembled=assembled, computed=computed, split=time.monotonic_ns())
    return [Answered(requests, answers, times)]


def padded_inputs(
    backend: Backend, requests: Sequence[InferRequest], rows: int, length: int, padding: Padding
) -> dict[str, Array]:
    """All inputs of a batch of requests of different lengths; see `assemble_padded`."""
    inputs: dict[str, Array] = {}
    for name in requests[0].inputs:
        dtype = backend.compute_dtype(name)
        if name in padding.inputs:
            inputs[name] = assemble_padded(requests, name, dtype, rows, length, padding)
        else:
            inputs[name] = assemble(requests, name, dtype, rows)
    return inputs


def _judged(
    verdict: GuardVerdict, requests: list[InferRequest], answers: list[Tensors], times: BatchTimes
) -> list[Answered | Failed]:
    """The results of a batch that the guard wants changed."""
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
