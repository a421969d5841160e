"""One copy of a model with the thread that runs it. A copy that hangs or breaks is taken out of service and loaded again.

A backend that computes in another process needs no thread for most batches: the event loop sends them and sees their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from halfserve.serve.engine.backend import CALLING_PROVIDERS, CPU_PROVIDERS, Backend, RequestBackend
from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import InferenceError, InstanceLostError, UnavailableError, is_device_lost
from halfserve.serve.engine.execution.assembly import BatchBuffers, GatheredBatch, gather, use_buffers
from halfserve.serve.engine.execution.batch import Answered, Failed, run_batch, run_one
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.execution.failure_log import FailureLog
from halfserve.serve.engine.execution.memory_limit import MemoryLimit
from halfserve.serve.engine.execution.output_backlog import BACKLOG, LARGE_BYTES
from halfserve.serve.engine.execution.request_batch import PendingAnswers, Rescheduled, run_requests
from halfserve.serve.engine.execution.staging import StagedBatch, Staging, is_worth_staging
from halfserve.serve.engine.padding.padding import Padding
from halfserve.serve.engine.padding.ragged import Ragged
from halfserve.serve.engine.precision_guard.guard import PrecisionGuard
from halfserve.serve.engine.queueing.waiting_requests import is_late
from halfserve.serve.engine.requests import Answer, CallingExecution, InferRequest

logger = logging.getLogger(__name__)


FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0
LOOKS: Final = 4  # number of checks of a running batch within its time limit
MOST_BATCHES: Final = 2


@dataclass(frozen=True)
class LostRequests:
    """Requests that were being computed when their copy broke; another copy may compute them.

    Attributes:
        requests: requests in order of arrival.
        error: their error if no other copy computes them.
        untouched: whether their batch had not begun, so that none of them has broken the copy.
    """

    requests: list[InferRequest]
    error: InferenceError
    untouched: bool = False


@dataclass(frozen=True)
class LateRequests:
    """Requests whose time ran out behind the previous batch of their copy; they were not computed."""

    requests: list[InferRequest]


Results = Sequence[Answered | Failed | PendingAnswers | Rescheduled | LostRequests | LateRequests]
Finished = Callable[[Results], None]


def seconds_of(results: Results) -> float | None:
    """Return the seconds that a batch took; None if it did not run as a whole."""
    first = results[0]
    if len(results) > 1 or not isinstance(first, Answered):
        return None
    return (first.times.split - first.times.started) / 1e9


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


@dataclass(eq=False)
class _Copy:
    """A loaded copy. No further batch may run on a broken one."""

    backend: Backend
    is_broken: bool = False


@dataclass(eq=False)
class _Job:
    """A batch that is being computed, or the next one."""

    loop: asyncio.AbstractEventLoop
    requests: list[InferRequest]
    finished: Finished
    buffers: BatchBuffers  # where its inputs are joined
    staged: StagedBatch | None = None  # None if it is gathered when its turn comes
    looks: int = 0
    results: Results | None = None  # None until it has been computed
    fault: str | None = None
    is_behind: bool = False  # whether another batch was there when it was submitted
    begun_ns: int = 0  # when it was handed to a backend that begins batches on the loop; 0 for others
    is_on_loop: bool = False  # whether no thread waits for its end


@dataclass(frozen=True)
class _NotLoaded:
    reason: str
    device_is_lost: bool


class Instance:
    """Runs batches one after the other, as long as it is up. Used on the event loop only.

    It takes the next batch while one runs, so that its thread need not wait until the event loop has seen the end of the first.
    A second thread gathers the next batch meanwhile, if that is large.

    Attributes:
        name: "name/version instance number".
        is_up: whether it can take batches, of which it holds at most two.
        restarts: number of recoveries from faults.
        fault: text of the latest fault; None before the first.
        memory: limits the rows that it computes at once.
        on_change: called when it is up again, and after each failed attempt to load it.
        on_lost_device: called after each attempt that failed because the device is lost to this process.
    """

    def __init__(self, backend: Backend, number: int, how: Supervision) -> None:
        self.name = f"{how.label} instance {number}"
        self.is_up = True
        self.restarts = 0
        self.fault: str | None = None
        self.memory = MemoryLimit(self.name)
        self._failures = FailureLog(self.name)
        self.on_change: Callable[[Instance], None] = lambda _: None
        self.on_lost_device: Callable[[str], None] = lambda _: None
        self._copy = _Copy(backend)
        self._number = number
        self._how = how
        self._is_plain = not how.padded_sizes and how.padding is None and how.ragged is None  # a lone request stays as it is
        self._worker = Worker(f"instance-{number}")
        self._staging = Staging(f"staging-{number}")
        self._left_behind = False  # whether the thread was abandoned, so that a new one is needed before the next job
        self._loop: asyncio.AbstractEventLoop | None = None  # kept because get_running_loop() makes a system call
        self._jobs: deque[_Job] = deque()  # the running job comes first
        self._timer: asyncio.TimerHandle | None = None  # checks a running batch, or loads the copy again
        self._wait_s = how.first_wait_s
        self._is_large = False  # whether the last batch had large outputs; only the thread uses it
        self._stopped = False
        self._closed: asyncio.Event | None = None  # set when a stopped copy has cleaned up, if that takes time

    @property
    def batches(self) -> int:
        """Number of batches that it holds: the running one, and the next."""
        return len(self._jobs)

    @property
    def takes_next(self) -> bool:
        """Whether it takes another batch now: one behind the running batch saves the way to its thread, if a thread runs it."""
        return self.is_up and (not self._jobs or (len(self._jobs) < MOST_BATCHES and not self._jobs[0].is_on_loop))

    @property
    def caller(self) -> CallingExecution | None:
        """The execution in progress of a model that may call other models."""
        backend = self._copy.backend
        return backend.caller if isinstance(backend, RequestBackend) else None

    @property
    def next_requests(self) -> list[InferRequest]:
        """The requests that wait here for the end of the running batch."""
        if not self._jobs or self._jobs[0].results is not None:  # the thread has begun the next batch
            return []
        return [request for job in islice(self._jobs, 1, None) for request in job.requests]

    def settle(self, settled: Callable[[Backend], None]) -> None:
        """Call `settled` with the backend on the thread that computes batches, and wait for its end; its errors pass through.

        For the loader's thread, before the first batch: runtimes keep handles and recordings of a device by thread.
        """
        self._worker.call(use_buffers, self._staging.buffers[0])  # which are locked for the device from the first batch on
        self._worker.call(settled, self._copy.backend)

    def next_try_s(self) -> float:
        """Return the seconds until it is loaded again; 0 while it is being loaded. Only meaningful while it is not up."""
        return 0.0 if self._timer is None else max(0.0, self._timer.when() - asyncio.get_running_loop().time())

    def run(self, requests: list[InferRequest], finished: Finished) -> None:
        """Start a batch, after the running one if there is one.

        `finished` is called once, later, with the results. Afterwards `is_up` tells if the copy can take more.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        job = self._next_job(loop, requests, finished)
        self._jobs.append(job)
        if self._how.max_compute_s is not None and self._timer is None:  # one timer checks many batches
            self._look_later(loop, self._how.max_compute_s)
        backend = self._copy.backend
        if isinstance(backend, RequestBackend) and not job.is_behind:
            job.begun_ns = time.monotonic_ns()
            try:
                job.is_on_loop = backend.begin(requests, partial(self._ready, job))
            except Exception:  # noqa: BLE001  (the thread meets it again, where an error is the result of the requests)
                job.begun_ns = 0
        if not job.is_on_loop:
            self._worker.submit(self._compute, job, self._copy)

    def _next_job(self, loop: asyncio.AbstractEventLoop, requests: list[InferRequest], finished: Finished) -> _Job:
        """Return a batch, which is being gathered if it is large and a device computes another one.

        A CPU would take the time from the batch that it computes: on 2 cores, images of 301 KB then came at 0.92 of the rate.
        """
        if not self._jobs:
            return _Job(loop, requests, finished, self._staging.buffers[0])
        job = _Job(loop, requests, finished, self._jobs[-1].buffers, is_behind=True)
        backend = self._copy.backend
        is_on_device = backend.provider not in CPU_PROVIDERS and not isinstance(backend, RequestBackend)
        if is_on_device and is_worth_staging(requests) and self._may_share:
            free, how = self._staging.other(job.buffers), self._how
            staged = StagedBatch(free, partial(gather, backend, requests, how.padded_sizes, how.padding, how.ragged))
            if self._staging.run(staged.stage):
                job.staged, job.buffers = staged, free
        return job

    @property
    def _may_share(self) -> bool:
        """Whether a batch is computed as a whole, as far as known."""
        invariance = self._how.invariance
        return invariance is None or (invariance.is_safe and not invariance.is_doubtful)

    @property
    def may_run_on_loop(self) -> bool:
        """Whether short batches need no thread: their time is predictable and has no limit, and they wait for no device."""
        how = self._how
        return not how.open_ended and how.max_compute_s is None and self._copy.backend.provider in CALLING_PROVIDERS

    def run_on_loop(self, requests: list[InferRequest]) -> Results:
        """Compute a short batch on the calling thread, while no other runs. Afterwards `is_up` tells if it can take more."""
        results, fault = self._results(requests, self._copy)
        if fault is not None:
            self._take_out(fault, asyncio.get_running_loop())
        return results

    def stop(self) -> None:
        """End the thread after the submitted batches, without waiting for it."""
        if self._stopped:
            return
        self._stopped = True
        self.on_change = lambda _: None  # breaks a reference cycle that would keep an unloaded model
        self._cancel_timer()
        if isinstance(self._copy.backend, RequestBackend):
            self._leave_to_thread(self._copy.backend)
            self._closed = asyncio.Event()
            self._worker.submit(self._close, self._copy.backend, asyncio.get_running_loop(), self._closed)
        self._worker.stop()
        self._staging.stop()

    async def closed(self) -> None:
        """Wait until a stopped copy has cleaned up."""
        if self._closed is not None:
            await self._closed.wait()

    def _close(self, backend: RequestBackend, loop: asyncio.AbstractEventLoop, closed: asyncio.Event) -> None:
        """Clean up; runs on the worker thread."""
        try:
            backend.close()
        except Exception:
            logger.exception("%s: cannot clean up", self.name, extra={"model": self.name})
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(closed.set)

    def _ready(self, job: _Job, at_once: bool) -> None:
        """End the batch that a backend has begun, on the calling thread if that takes no time."""
        backend = self._copy.backend
        if at_once:
            results, job.fault = self._results(job.requests, self._copy, begun_ns=job.begun_ns)
            job.results = results
            self._done()
        elif isinstance(backend, RequestBackend):
            self._leave_to_thread(backend)

    def _leave_to_thread(self, backend: RequestBackend) -> None:
        """Have the thread wait for the end of the batch that the backend has begun, if there is one."""
        backend.let_go()
        if self._jobs and self._jobs[0].is_on_loop:
            self._jobs[0].is_on_loop = False
            self._worker.submit(self._compute, self._jobs[0], self._copy)

    def _compute(self, job: _Job, copy: _Copy) -> None:
        """Compute a batch; runs on the worker thread."""
        if self._is_large:
            BACKLOG.wait()
        use_buffers(job.buffers)
        gathered = None if job.staged is None else job.staged.take()
        late = _late(job.requests) if job.is_behind else []
        if late:
            in_time = [request for request in job.requests if request not in late]
            results, job.fault = self._results(in_time, copy) if in_time else ([], None)
            results = [LateRequests(late), *results]
        else:
            results, job.fault = self._results(job.requests, copy, gathered, begun_ns=job.begun_ns)
        job.results = results
        self._is_large = _are_large(results)
        # Waking the event loop can cost this thread Python's lock: if the next batch is ready, it begins first.
        if job.staged is None or not self._worker.has_next or not self._staging.run(self._tell, job):
            self._tell(job)

    def _tell(self, job: _Job) -> None:
        """Wake the event loop, which ends the batch."""
        with contextlib.suppress(RuntimeError):  # the loop is closed because the server gave up waiting for this batch
            job.loop.call_soon_threadsafe(self._done)

    def _results(
        self, requests: list[InferRequest], copy: _Copy, gathered: GatheredBatch | None = None, *, begun_ns: int = 0
    ) -> tuple[Results, str | None]:
        """Return a batch's results, and the fault if this batch broke the copy.

        Args:
            requests: the batch.
            copy: computes it.
            gathered: the inputs, if they are joined already.
            begun_ns: see `_Job`.
        """
        how = self._how
        if copy.is_broken and not begun_ns:
            return [_lost(requests, untouched=True)], None
        results: Results
        try:
            if isinstance(copy.backend, RequestBackend):
                return run_requests(copy.backend, requests, begun_ns or time.monotonic_ns()), None
            invariance = how.invariance
            if len(requests) == 1 and self._is_plain and (invariance is None or invariance.is_safe):
                results = run_one(copy.backend, requests[0], how.guard, self.memory, invariance)
            else:
                results = run_batch(
                    copy.backend,
                    requests,
                    how.guard,
                    memory=self.memory,
                    padded_sizes=how.padded_sizes,
                    invariance=invariance,
                    padding=how.padding,
                    ragged=how.ragged,
                    gathered=gathered if self._may_share else None,
                )
        except InstanceLostError as error:
            copy.is_broken = True
            what = "model's process" if isinstance(copy.backend, RequestBackend) else "device"
            return [_lost(requests, what=what)], _first_line(error)
        if len(results) > 1 or isinstance(results[0], Failed):
            self._failures.note(results)
        return results, None

    def _done(self) -> None:
        """End the computed batches in order. An abandoned batch is not among them, and its requests have their errors."""
        while self._jobs and (results := self._jobs[0].results) is not None:
            job = self._jobs.popleft()
            if job.fault is not None:
                self._take_out(job.fault, job.loop)
            elif self.fault is not None and self.is_up:
                self._wait_s = self._how.first_wait_s
            job.finished(results)

    def _look_later(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._timer = loop.call_later(limit_s / LOOKS, self._look, limit_s)

    def _look(self, limit_s: float) -> None:
        """Abandon the running batch if it has used up its time.

        It is checked LOOKS times, because the clock goes on while the whole process is stopped, and a batch does not.
        """
        self._timer = None
        if not self._jobs:
            return
        job = self._jobs[0]
        job.looks += 1
        if job.looks <= LOOKS or job.results is not None:
            self._look_later(job.loop, limit_s)
            return
        if isinstance(self._copy.backend, RequestBackend):
            self._leave_to_thread(self._copy.backend)
        _, *behind = self._jobs
        self._jobs.clear()
        self._copy.is_broken = True
        if self._how.reload is not None:
            # A thread cannot be killed: if the runtime cannot end its call, the thread is abandoned until the call returns.
            self._copy.backend.give_up()
            self._worker.stop()
            self._staging.stop()
            self._staging = Staging(f"staging-{self._number}")  # the abandoned thread may still read the old buffers
            self._left_behind = True
        self._take_out(f"a batch was not computed within {limit_s:g} s", job.loop)
        error = UnavailableError(f"the model did not answer within its {limit_s:g} s and is being restarted; try again later")
        job.finished([Failed(request, error) for request in job.requests])
        for untouched in behind:
            untouched.finished([_lost(untouched.requests, untouched=True)])

    def _take_out(self, fault: str, loop: asyncio.AbstractEventLoop) -> None:
        self.is_up = False
        self.fault = fault
        said = "%s: is taken out (%s); it is loaded again in %g s"
        logger.error(said, self.name, fault, self._wait_s, extra={"model": self.name})
        self._bring_back_later(loop)

    def _bring_back_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._cancel_timer()
        if not self._stopped:
            self._timer = loop.call_later(self._wait_s, self._bring_back, loop)
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _bring_back(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._left_behind:
            try:
                self._worker = Worker(f"instance-{self._number}")
            except RuntimeError as error:  # the process may start no more threads
                self._loaded(loop, _NotLoaded(_first_line(error), device_is_lost=False))
                return
            self._left_behind = False
        self._worker.submit(self._load, loop)

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """Load the copy again; runs on the worker thread. Without `reload`, it suffices that the thread is free again."""
        loaded: Backend | _NotLoaded
        try:
            loaded = self._copy.backend if self._how.reload is None else self._how.reload(self._number)
        except Exception as error:  # noqa: BLE001  (an error of the runtime must not end the thread)
            loaded = _NotLoaded(_first_line(error), is_device_lost(error))
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._loaded, loop, loaded)

    def _loaded(self, loop: asyncio.AbstractEventLoop, loaded: Backend | _NotLoaded) -> None:
        if self._stopped:
            if isinstance(loaded, RequestBackend):
                loaded.give_up()
            return
        if isinstance(loaded, _NotLoaded):
            self.fault = loaded.reason
            said = "%s: cannot be loaded again (%s); the next attempt is in %g s"
            logger.error(said, self.name, loaded.reason, self._wait_s, extra={"model": self.name})
            self._bring_back_later(loop)
            if loaded.device_is_lost:
                self.on_lost_device(loaded.reason)
        else:
            self._copy = _Copy(loaded)
            self.is_up = True
            self.restarts += 1
            logger.warning("%s: is up again", self.name, extra={"model": self.name})
        self.on_change(self)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _late(requests: list[InferRequest]) -> list[InferRequest]:
    """Return the requests whose time ran out while they waited for their copy."""
    now = time.monotonic()
    return [request for request in requests if is_late(request, now, now)]


def _lost(requests: list[InferRequest], *, untouched: bool = False, what: str = "device") -> LostRequests:
    return LostRequests(
        requests, UnavailableError(f"the {what} failed while it computed this request; send it again"), untouched
    )


def _are_large(results: Results) -> bool:
    """Return whether the outputs of a batch are serialized apart from the event loop."""
    last = results[-1]
    if not isinstance(last, Answered):
        return False
    answer = last.answers[0]
    # Not the answer's own values: one that lacks a declared output is an error of its request alone.
    outputs = answer.batch.arrays if isinstance(answer, Answer) else answer
    return sum([array.nbytes for array in outputs.values()]) > LARGE_BYTES


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
