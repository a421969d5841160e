"""Computes the batches of a copy on a `Backend`, which takes tensors, and logs the requests on which it failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from halfserve.serve.engine.backend import CALLING_PROVIDERS, CPU_PROVIDERS, Backend
from halfserve.serve.engine.errors import BackendError, InstanceLostError
from halfserve.serve.engine.execution.assembly import SCRATCH_BYTES, assemble, device_inputs, gather, use_buffers
from halfserve.serve.engine.execution.batch import failed, judged, run_batch, take_apart
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.execution.batch_runner import BatchRunner, PreparedBatch, lost
from halfserve.serve.engine.execution.memory_limit import MemoryLimit
from halfserve.serve.engine.execution.output_backlog import BACKLOG, LARGE_BYTES
from halfserve.serve.engine.execution.recovery import FIRST_WAIT_S
from halfserve.serve.engine.execution.staging import StagedBatch, Staging, is_worth_staging
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.engine.padding.padding import Padding
from halfserve.serve.engine.padding.ragged import Ragged
from halfserve.serve.engine.precision_guard.guard import PrecisionGuard
from halfserve.serve.engine.requests import Answer, BatchOutputs, InferRequest
from halfserve.serve.engine.results import Answered, Failed, Results
from halfserve.serve.engine.tensors import RawInputs, Tensors

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0  # seconds between two lines of the log
MAX_ID: Final = 256  # most bytes of a request's id in a line


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """Settings that all copies of one model share.

    Attributes:
        label: "name/version", for the log.
        guard: checks every batch's outputs; None checks nothing.
        padded_sizes: numbers of rows that batches are padded to, in rising order.
        invariance: decides whether requests may share batches; None if there are no rows to share.
        padding: pads requests of different lengths; None pads nothing.
        ragged: joins requests of different shapes; None for ordinary batches.
        reload: loads the copy of a number again; None reuses the old one, once its thread is free.
        max_compute_s: seconds after which a batch is abandoned (a quarter later at most); None sets no limit.
        open_ended: whether the duration of a batch depends on its values.
        first_wait_s: seconds from a fault until the copy is loaded again. They double with each further fault, up to a minute,
            until a batch is computed.
    """

    label: str
    guard: PrecisionGuard | None = None
    padded_sizes: Sequence[int] = ()
    invariance: BatchInvariance | None = None
    padding: Padding | None = None
    ragged: Ragged | None = None
    reload: Callable[[int], Backend] | None = None
    max_compute_s: float | None = None
    open_ended: bool = False
    first_wait_s: float = FIRST_WAIT_S

    def may_run_on_loop(self, provider: str) -> bool:
        """Return whether short batches take a predictable time without a limit, on the calling thread."""
        return not self.open_ended and self.max_compute_s is None and provider in CALLING_PROVIDERS


class FailureLog:
    """Logs requests on which one copy of a model failed, at most one line a second. Used by one thread at a time."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`label`: name of the model and number of the copy."""
        self._label = label
        self._clock = clock
        self._next = 0.0
        self._left_out = 0

    def note(self, results: list[Answered | Failed]) -> None:
        """Log failures of the model. Errors of the caller are not logged."""
        for result in results:
            if isinstance(result, Failed) and isinstance(result.error, BackendError):
                self._note(result)

    def _note(self, failed: Failed) -> None:
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more failed since the last such line)" if self._left_out else ""
        self._next, self._left_out = now + EVERY_S, 0
        request_id = failed.request.id[:MAX_ID].decode("utf-8", "replace")
        named = f"request {request_id!r}" if request_id else "a request without an id"
        cause = failed.error.__cause__
        of = "" if cause is None else f" [{type(cause).__name__}]"
        about = {"model": self._label, "id": request_id}
        logger.error("%s: failed on %s: %s%s%s", self._label, named, failed.error, of, more, extra=about)


class TensorRunner(BatchRunner):
    """Joins the inputs of requests, computes them on a backend, and splits the outputs.

    | state of a batch | event | what happens | next state |
    |---|---|---|---|
    | submitted behind another one | it is large, and on a device | a second thread joins its inputs | staged |
    | submitted | its turn comes | join its inputs on the copy's thread | joined |
    | staged | its turn comes | wait for the second thread; without its inputs, join them here | joined |
    | joined | the backend computes it | check, split | answered |
    | joined | memory runs out | compute it in pieces, learn the rows that fit (`MemoryLimit`) | answered, or it fails |
    | joined | outputs are not finite | count, refuse, or compute its requests on the fp32 twin (`PrecisionGuard`) | answered |
    | joined | it fails | bisect it until only the requests at fault have failed (`run_batch`) | answered and failed |
    | joined | the device is lost | the copy is broken; another copy computes the requests | lost |
    """

    def __init__(
        self, backend: Backend, number: int, how: Supervision, memory: MemoryLimit, failures: FailureLog, staging: Staging
    ) -> None:
        super().__init__(has_process=False, may_run_on_loop=how.may_run_on_loop(backend.provider))
        self.backend = backend
        self._number = number
        self._how = how
        self._memory = memory
        self._failures = failures
        self._staging = staging
        self._is_plain = not how.padded_sizes and how.padding is None and how.ragged is None  # a lone request stays as it is
        # A CPU would take the time from the batch that it computes: on 2 cores, images of 301 KB then came at 0.92 of the rate.
        self._may_stage = backend.provider not in CPU_PROVIDERS
        # Buffers of the computed batch, and of the last one submitted.
        self._buffers = self._latest = staging.buffers[0]
        self._is_large = False  # whether the last batch had large outputs; only the thread uses it
        self._is_given_up = False

    @property
    def most_rows(self) -> int | None:
        return self._memory.rows

    @property
    def shares_batches(self) -> bool:
        invariance = self._how.invariance
        return invariance is None or invariance.is_safe

    def prepare(self, requests: list[InferRequest], *, is_behind: bool) -> PreparedBatch | None:
        """Begin to join the inputs of a large batch while a device computes another one."""
        if not is_behind:
            self._buffers = self._latest = self._staging.buffers[0]
            return None
        if not self._may_stage or not is_worth_staging(requests) or not self._is_joined_whole:
            return None
        free, how = self._staging.other(self._latest), self._how
        staged = StagedBatch(free, partial(gather, self.backend, requests, how.padded_sizes, how.padding, how.ragged))
        if not self._staging.run(staged.stage):
            return None
        self._latest = free
        return staged

    def call_beside(self, function: Callable[..., object], *arguments: Any) -> bool:
        return self._staging.run(function, *arguments)

    def enter_thread(self) -> None:
        use_buffers(self._buffers)  # locked for the device from the first batch on

    def run_on_thread(
        self, requests: list[InferRequest], prepared: PreparedBatch | None, begun_ns: int, *, is_behind: bool
    ) -> Results:
        if self._is_large:
            BACKLOG.wait()
        if isinstance(prepared, StagedBatch):
            self._buffers = prepared.buffers
            use_buffers(self._buffers)
            prepared.take()
        else:
            use_buffers(self._buffers)
        results = super().run_on_thread(requests, prepared, begun_ns, is_behind=is_behind)
        self._is_large = _are_large(results)
        return results

    @property
    def can_reload(self) -> bool:
        return self._how.reload is not None

    def reloaded(self) -> BatchRunner:
        how, number = self._how, self._number
        backend = self.backend if how.reload is None else how.reload(number)
        # An abandoned thread may still read the old buffers.
        staging = Staging(f"staging-{number}") if self._is_given_up else self._staging
        return TensorRunner(backend, number, how, self._memory, self._failures, staging)

    def give_up(self) -> None:
        self._is_given_up = True
        self.backend.give_up()
        self._staging.stop()

    def stop(self) -> None:
        self._staging.stop()

    def run(self, requests: list[InferRequest], prepared: PreparedBatch | None = None, begun_ns: int = 0) -> Results:  # noqa: ARG002  (of processes)
        if self.is_broken:
            return lost(requests)
        try:
            results = self._compute(requests, prepared)
        except InstanceLostError as error:
            return self.broken(requests, error)
        if len(results) > 1 or isinstance(results[0], Failed):
            self._failures.note(results)
        return results

    @property
    def _is_joined_whole(self) -> bool:
        """Whether a batch is computed as a whole, as far as known."""
        invariance = self._how.invariance
        return invariance is None or (invariance.is_safe and not invariance.is_doubtful)

    def _compute(self, requests: list[InferRequest], prepared: PreparedBatch | None) -> list[Answered | Failed]:
        """Compute a batch.

        Raises:
            InstanceLostError: the device is lost.
        """
        how = self._how
        invariance = how.invariance
        if len(requests) == 1 and self._is_plain and (invariance is None or invariance.is_safe):
            return self._compute_one(requests[0])
        return run_batch(
            self.backend,
            requests,
            how.guard,
            memory=self._memory,
            padded_sizes=how.padded_sizes,
            invariance=invariance,
            padding=how.padding,
            ragged=how.ragged,
            gathered=prepared.gathered if isinstance(prepared, StagedBatch) and self._is_joined_whole else None,
        )

    def _compute_one(self, request: InferRequest) -> list[Answered | Failed]:
        """Compute a request alone, without padding: what `run_batch` does with it, in one piece.

        Raises:
            InstanceLostError: the device is lost.
        """
        backend, guard, memory, invariance = self.backend, self._how.guard, self._memory, self._how.invariance
        requests, rows = [request], request.rows
        try:
            started = time.monotonic_ns()
            inputs = _inputs_of_one(backend, request)
            assembled = time.monotonic_ns()
            if memory.rows is not None or rows > memory.fitted:
                outputs = memory.run(backend, inputs, rows)
            else:
                try:
                    outputs = backend.run(inputs)
                except Exception as error:  # noqa: BLE001  (raised again unless memory ran out)
                    outputs = memory.run_again(backend, inputs, rows, error)
            computed = time.monotonic_ns()
            has_rows = True
            for array in outputs.values():
                if not array.ndim or len(array) != rows:
                    has_rows = False
            if not has_rows and invariance is not None:
                invariance.look(outputs, rows)
                if not invariance.is_safe:
                    return run_batch(backend, requests, guard, memory=memory, invariance=invariance)
            verdict = None if guard is None else guard.after(requests, inputs, outputs)
            if verdict is not None:
                outputs = verdict.outputs
            if has_rows and verdict is None:
                answers: list[Tensors] = [Answer(BatchOutputs(outputs), request.outputs, 0, rows)]
            else:
                answers = take_apart(outputs, requests, rows)
            times = BatchTimes(started=started, assembled=assembled, computed=computed, split=time.monotonic_ns())
            return [Answered(requests, answers, times)] if verdict is None else judged(verdict, requests, answers, times)
        except Exception as error:  # noqa: BLE001  (any failure is the request's result)
            return [failed(request, error)]


def _inputs_of_one(backend: Backend, request: InferRequest) -> Tensors:
    """Return the inputs of a request that is computed alone; see `assemble`."""
    given = request.inputs
    views = given.small_arrays(SCRATCH_BYTES) if type(given) is RawInputs else None
    if views is None:
        on_device = device_inputs(backend, [request], request.rows)
        if on_device is not None:
            return on_device
        return {name: assemble([request], name, backend.compute_dtype(name), request.rows) for name in given}
    for name, view in views.items():
        dtype, is_aligned = backend.compute_dtype(name), view.flags.aligned
        if view.dtype is not dtype or not is_aligned:  # runtimes may not take unaligned pointers
            views[name] = view.astype(dtype, copy=not is_aligned)
    return views


def _are_large(results: Results) -> bool:
    """Return whether the outputs of a batch are serialized apart from the event loop."""
    last = results[-1]
    if not isinstance(last, Answered):
        return False
    answer = last.answers[0]
    # Not the answer's own values: one that lacks a declared output is an error of its request alone.
    outputs = answer.batch.arrays if isinstance(answer, Answer) else answer
    return sum([array.nbytes for array in outputs.values()]) > LARGE_BYTES
