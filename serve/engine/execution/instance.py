"""One copy of a model with the thread that runs it: hands batches to the thread, and ends them in order.

A copy that computes in another process needs no thread for most batches: the event loop sends them and sees their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.engine.execution.batch_runner import BatchRunner, PreparedBatch, lost
from halfserve.serve.engine.execution.recovery import Recovery
from halfserve.serve.engine.requests import CallingExecution, InferRequest
from halfserve.serve.engine.results import BegunBatch, Failed, Results, fault_of

logger = logging.getLogger(__name__)

LOOKS: Final = 4  # number of checks of a running batch within its time limit
MOST_BATCHES: Final = 2

Finished = Callable[[Results], None]


@dataclass(eq=False)
class _Job(BegunBatch):
    """A batch that is being computed, or the next one."""

    instance: Instance
    loop: asyncio.AbstractEventLoop
    requests: list[InferRequest]
    finished: Finished
    prepared: PreparedBatch | None = None  # None if it is gathered when its turn comes
    looks: int = 0
    results: Results | None = None  # None until it has been computed
    is_behind: bool = False  # whether another batch was there when it was submitted
    begun_ns: int = 0  # when it was handed to a backend that begins batches on the loop; 0 for others
    is_on_loop: bool = False  # whether no thread waits for its end

    def ready(self, *, at_once: bool) -> None:
        self.instance.end_begun(self, at_once=at_once)


class Instance:
    """Runs batches one after the other, as long as it is up. Used on the event loop only.

    It takes the next batch while one runs, so that its thread need not wait until the event loop has seen the end of the first.

    | state of a batch | event | what happens | next state |
    |---|---|---|---|
    | new | another batch is computed | prepare it if it is large; the thread runs it next | behind |
    | new | the copy's process can begin it | the event loop sends it | begun |
    | new | otherwise | the thread computes it | running |
    | behind | the thread is free | drop its late requests, compute the others | running |
    | begun | its answers are there at once | read them on the event loop | computed |
    | begun | its answers take time, or the instance stops | the thread waits for them | running |
    | begun, running | its time limit passes | its requests fail, the copy is taken out (`Recovery`) | abandoned |
    | behind | the batch before it breaks the copy, or is abandoned | its requests are lost untouched | computed |
    | running | the runner returns | results, in which a broken copy is a fault | computed |
    | computed | all batches before it have ended | take a broken copy out, deliver the results | ended |

    Attributes:
        recovery: the copy and its thread, and whether they are in service.
    """

    def __init__(
        self, name: str, runner: BatchRunner, number: int, *, max_compute_s: float | None, first_wait_s: float
    ) -> None:
        """Start the thread.

        Args:
            name: "name/version instance number".
            runner: computes the batches.
            number: number of the copy.
            max_compute_s: seconds after which a batch is abandoned (a quarter later at most); None sets no limit.
            first_wait_s: see `Supervision`.
        """
        self.recovery = Recovery(name, runner, number, first_wait_s)
        self._max_compute_s = max_compute_s
        self._loop: asyncio.AbstractEventLoop | None = None  # kept because get_running_loop() makes a system call
        self._jobs: deque[_Job] = deque()  # the running job comes first
        self._timer: asyncio.TimerHandle | None = None  # checks a running batch
        self._is_stopped = False
        self._closed: asyncio.Event | None = None  # set when a stopped copy has cleaned up, if that takes time

    @property
    def is_up(self) -> bool:
        """Whether it can take batches, of which it holds at most two."""
        return self.recovery.is_up

    @property
    def restarts(self) -> int:
        """Number of recoveries from faults."""
        return self.recovery.restarts

    @property
    def fault(self) -> str | None:
        """Text of the latest fault; None before the first."""
        return self.recovery.fault

    @property
    def most_rows(self) -> int | None:
        """The rows that it computes at once; None for no limit."""
        return self.recovery.runner.most_rows

    @property
    def shares_batches(self) -> bool:
        """Whether requests may share a batch, as far as known."""
        return self.recovery.runner.shares_batches

    @property
    def batches(self) -> int:
        """Number of batches that it holds: the running one, and the next."""
        return len(self._jobs)

    @property
    def takes_next(self) -> bool:
        """Whether it takes another batch now: one behind the running batch saves the way to its thread, if a thread runs it."""
        return self.recovery.is_up and (not self._jobs or (len(self._jobs) < MOST_BATCHES and not self._jobs[0].is_on_loop))

    @property
    def may_run_on_loop(self) -> bool:
        """See `BatchRunner`."""
        return self.recovery.runner.may_run_on_loop

    @property
    def caller(self) -> CallingExecution | None:
        """The execution in progress of a model that may call other models."""
        return self.recovery.runner.caller

    @property
    def next_requests(self) -> list[InferRequest]:
        """The requests that wait here for the end of the running batch."""
        if not self._jobs or self._jobs[0].results is not None:  # the thread has begun the next batch
            return []
        return [request for job in islice(self._jobs, 1, None) for request in job.requests]

    def settle(self, settled: Callable[[], None]) -> None:
        """Call `settled` on the thread that computes batches, and wait for its end; its errors pass through.

        For the loader's thread, before the first batch: runtimes keep handles and recordings of a device by thread.
        """
        self.recovery.worker.call(self.recovery.runner.enter_thread)
        self.recovery.worker.call(settled)

    def run(self, requests: list[InferRequest], finished: Finished) -> None:
        """Start a batch, after the running one if there is one.

        `finished` is called once, later, with the results. Afterwards `is_up` tells if the copy can take more.
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        runner = self.recovery.runner
        job = _Job(self, loop, requests, finished, is_behind=bool(self._jobs))
        job.prepared = runner.prepare(requests, is_behind=job.is_behind)
        self._jobs.append(job)
        if self._max_compute_s is not None and self._timer is None:  # one timer checks many batches
            self._look_later(loop, self._max_compute_s)
        if runner.has_process and not job.is_behind:
            job.begun_ns = time.monotonic_ns()
            try:
                job.is_on_loop = runner.begin(requests, job)
            except Exception:  # noqa: BLE001  (the thread meets it again, where an error is the result of the requests)
                job.begun_ns = 0
        if not job.is_on_loop:
            self.recovery.worker.submit(self._compute, job, runner)

    def run_on_loop(self, requests: list[InferRequest]) -> Results:
        """Compute a short batch on the calling thread, while no other runs. Afterwards `is_up` tells if it can take more."""
        runner = self.recovery.runner
        results = runner.run(requests)
        if runner.is_broken and (fault := fault_of(results)) is not None:
            self._take_out(fault, asyncio.get_running_loop())
        return results

    def stop(self) -> None:
        """End the thread after the submitted batches, without waiting for it."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._cancel_timer()
        if self.recovery.runner.has_process:
            self._leave_to_thread()
            self._closed = asyncio.Event()
            self.recovery.worker.submit(self._close, self.recovery.runner, asyncio.get_running_loop(), self._closed)
        self.recovery.stop()

    async def closed(self) -> None:
        """Wait until a stopped copy has cleaned up."""
        if self._closed is not None:
            await self._closed.wait()

    def _close(self, runner: BatchRunner, loop: asyncio.AbstractEventLoop, closed: asyncio.Event) -> None:
        """Clean up; runs on the worker thread."""
        try:
            runner.close()
        except Exception:
            logger.exception("%s: cannot clean up", self.recovery.name, extra={"model": self.recovery.name})
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(closed.set)

    def end_begun(self, job: _Job, *, at_once: bool) -> None:
        """End the batch that a backend has begun, on the calling thread if that takes no time."""
        if at_once:
            job.results = self.recovery.runner.run(job.requests, begun_ns=job.begun_ns)
            self._done()
        else:
            self._leave_to_thread()

    def _leave_to_thread(self) -> None:
        """Have the thread wait for the end of the batch that the backend has begun, if there is one."""
        runner = self.recovery.runner
        runner.let_go()
        if self._jobs and self._jobs[0].is_on_loop:
            self._jobs[0].is_on_loop = False
            self.recovery.worker.submit(self._compute, self._jobs[0], runner)

    def _compute(self, job: _Job, runner: BatchRunner) -> None:
        """Compute a batch; runs on the worker thread."""
        prepared = job.prepared
        job.results = runner.run_on_thread(job.requests, prepared, job.begun_ns, is_behind=job.is_behind)
        # Waking the event loop can cost this thread Python's lock: if the next batch is ready, it begins first.
        if prepared is None or not self.recovery.worker.has_next or not runner.call_beside(self._tell, job):
            self._tell(job)

    def _tell(self, job: _Job) -> None:
        """Wake the event loop, which ends the batch."""
        with contextlib.suppress(RuntimeError):  # the loop is closed because the server gave up waiting for this batch
            job.loop.call_soon_threadsafe(self._done)

    def _done(self) -> None:
        """End the computed batches in order. An abandoned batch is not among them, and its requests have their errors."""
        while self._jobs and (results := self._jobs[0].results) is not None:
            job = self._jobs.popleft()
            if (fault := fault_of(results)) is not None:
                self._take_out(fault, job.loop)
            else:
                self.recovery.computed()
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
        if self.recovery.runner.has_process:
            self._leave_to_thread()
        _, *behind = self._jobs
        self._jobs.clear()
        self.recovery.abandon()
        self._take_out(f"a batch was not computed within {limit_s:g} s", job.loop)
        error = UnavailableError(f"the model did not answer within its {limit_s:g} s and is being restarted; try again later")
        job.finished([Failed(request, error) for request in job.requests])
        for untouched in behind:
            untouched.finished(lost(untouched.requests))

    def _take_out(self, fault: str, loop: asyncio.AbstractEventLoop) -> None:
        self._cancel_timer()
        self.recovery.take_out(fault, loop)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
