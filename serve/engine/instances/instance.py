"""One copy of a model with the thread that runs it, watched: what hangs or breaks is taken out and loaded anew."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve.engine.backend import Backend
from serve.engine.batches.batch import Failed, run_batch
from serve.engine.batches.memory_limit import MemoryLimit
from serve.engine.device_faults import InstanceLostError, is_device_lost
from serve.engine.errors import UnavailableError
from serve.engine.instances.supervision import LONGEST_WAIT_S, Finished, Late, Lost, Results, Supervision
from serve.engine.queueing.waiting_line import is_late
from serve.engine.requests import InferRequest
from serve.engine.worker import Worker

logger = logging.getLogger(__name__)

LOOKS = 4  # in the time that a batch may take

ON_CPU = "CPUExecutionProvider"


@dataclass(slots=True, eq=False)
class _Copy:
    """A loaded copy. The batch behind the one that broke it must not run on it."""

    backend: Backend
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """A batch that is being computed, or is next."""

    loop: asyncio.AbstractEventLoop
    requests: list[InferRequest]
    finished: Finished
    looks: int = 0
    computed: bool = False
    fault: str | None = None
    is_behind: bool = False  # another one, when it was submitted


@dataclass(frozen=True)
class _NotLoaded:
    """Why a copy could not be loaded anew."""

    reason: str
    device_is_lost: bool


class Instance:
    """Runs batches one after the other, as long as it is up. To be used on the event loop only.

    It takes the next batch while one runs: its thread need not wait then until the event loop has seen the first one's end.

    Attributes:
        name: "name/version instance number".
        is_up: it can take batches, up to two.
        restarts: how often it came back after a fault.
        fault: what the latest fault was; None before the first.
        memory: how many rows it computes at once.
        on_change: is called when it is up again, and each time that it could not be loaded anew.
        on_lost_device: is told each time that it could not be loaded anew because the device computes for nobody here any more.
    """

    def __init__(self, backend: Backend, number: int, how: Supervision) -> None:
        """A copy that is up.

        Args:
            backend: the copy.
            number: of it, among the model's.
            how: to run and watch it.
        """
        self.name = f"{how.label} instance {number}"
        self.is_up = True
        self.restarts = 0
        self.fault: str | None = None
        self.memory = MemoryLimit(self.name)
        self.on_change: Callable[[Instance], None] = lambda _: None
        self.on_lost_device: Callable[[str], None] = lambda _: None
        self._copy = _Copy(backend)
        self._number = number
        self._how = how
        self._worker = Worker(f"instance-{number}")
        self._left_behind = False  # the thread: before anything else is submitted there has to be another one
        self._jobs: deque[_Job] = deque()  # the one that runs first
        self._timer: asyncio.TimerHandle | None = None  # to look after a batch, or to load anew
        self._wait_s = how.first_wait_s
        self._stopped = False

    @property
    def batches(self) -> int:
        """That it has: the one that runs, and the next."""
        return len(self._jobs)

    def next_try_s(self) -> float:
        """Seconds until it is loaded anew; 0 while that goes on. To be asked while it is not up."""
        return 0.0 if self._timer is None else max(0.0, self._timer.when() - asyncio.get_running_loop().time())

    def run(self, requests: list[InferRequest], finished: Finished) -> None:
        """Start a batch, after the one that runs if one does.

        `finished` is called once, later, with what became of it. `is_up` says then if there can be more.
        """
        loop = asyncio.get_running_loop()
        job = _Job(loop, requests, finished, is_behind=bool(self._jobs))
        self._jobs.append(job)
        if self._how.max_compute_s is not None and self._timer is None:  # one timer looks after many batches
            self._look_later(loop, self._how.max_compute_s)
        self._worker.submit(self._compute, job, self._copy)

    @property
    def may_run_on_loop(self) -> bool:
        """Whether short batches need no thread: they stay short, nobody has to watch over them, no device is waited for."""
        how = self._how
        return not how.open_ended and how.max_compute_s is None and self._copy.backend.provider == ON_CPU

    def run_on_loop(self, requests: list[InferRequest]) -> Results:
        """Compute a short batch here and now, while nothing else runs. `is_up` says then if there can be more."""
        results, fault = self._results(requests, self._copy)
        if fault is not None:
            self._take_out(fault, asyncio.get_running_loop())
        return results

    def stop(self) -> None:
        """End the thread once what was submitted is done. Does not wait for it."""
        self._stopped = True
        self.on_change = lambda _: None  # a circle, which the collector may never look at: it would keep an unloaded model
        self._cancel_timer()
        self._worker.stop()

    def _compute(self, job: _Job, copy: _Copy) -> None:
        """On the worker thread."""
        late = _late(job.requests) if job.is_behind else []
        if late:
            in_time = [request for request in job.requests if request not in late]
            results, job.fault = self._results(in_time, copy) if in_time else ([], None)
            results = [Late(late), *results]
        else:
            results, job.fault = self._results(job.requests, copy)
        job.computed = True
        with contextlib.suppress(RuntimeError):  # the loop has been closed: the server gave up waiting for this batch
            job.loop.call_soon_threadsafe(self._done, job, results)

    def _results(self, requests: list[InferRequest], copy: _Copy) -> tuple[Results, str | None]:
        """What becomes of a batch, and what broke this copy, if this batch did."""
        how = self._how
        if copy.is_broken:
            return [_lost(requests, untouched=True)], None
        try:
            results = run_batch(
                copy.backend, requests, how.guard, memory=self.memory, padded_sizes=how.padded_sizes, joining=how.joining
            )
        except InstanceLostError as error:
            copy.is_broken = True
            return [_lost(requests)], _first_line(error)
        return results, None

    def _done(self, job: _Job, results: Results) -> None:
        if not self._jobs or self._jobs[0] is not job:
            return  # it was given up, and its requests have their answers
        self._jobs.popleft()
        if job.fault is not None:
            self._take_out(job.fault, job.loop)
        elif self.fault is not None and self.is_up:
            self._wait_s = self._how.first_wait_s
        job.finished(results)

    def _look_later(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._timer = loop.call_later(limit_s / LOOKS, self._look, limit_s)

    def _look(self, limit_s: float) -> None:
        """Give the batch that runs up, if it has had its time.

        It is looked at several times, since the clock goes on while the whole process is stopped, and a batch does not.
        """
        self._timer = None
        if not self._jobs:
            return
        job = self._jobs[0]
        job.looks += 1
        if job.looks <= LOOKS or job.computed:
            self._look_later(job.loop, limit_s)
            return
        _, *behind = self._jobs
        self._jobs.clear()
        self._copy.is_broken = True
        if self._how.reload is not None:
            # Nobody can end a thread: where the runtime cannot end its call, it is left to itself, until that returns.
            self._copy.backend.give_up()
            self._worker.stop()
            self._left_behind = True
        self._take_out(f"a batch was not computed within {limit_s:g} s", job.loop)
        error = UnavailableError(f"the model did not answer within its {limit_s:g} s and is being restarted; try again later")
        job.finished([Failed(request, error) for request in job.requests])
        for untouched in behind:
            untouched.finished([_lost(untouched.requests, untouched=True)])

    def _take_out(self, fault: str, loop: asyncio.AbstractEventLoop) -> None:
        self.is_up = False
        self.fault = fault
        logger.error("%s: is taken out (%s); it is loaded anew in %g s", self.name, fault, self._wait_s)
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
            except RuntimeError as error:  # there are as many threads as may be
                self._loaded(loop, _NotLoaded(_first_line(error), device_is_lost=False))
                return
            self._left_behind = False
        self._worker.submit(self._load, loop)

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the worker thread. Where there is no way to load anew, waiting until the thread is free again is all there is."""
        loaded: Backend | _NotLoaded
        try:
            loaded = self._copy.backend if self._how.reload is None else self._how.reload(self._number)
        except Exception as error:  # noqa: BLE001  (whatever a runtime raises must not end the thread)
            loaded = _NotLoaded(_first_line(error), is_device_lost(error))
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._loaded, loop, loaded)

    def _loaded(self, loop: asyncio.AbstractEventLoop, loaded: Backend | _NotLoaded) -> None:
        if self._stopped:
            return
        if isinstance(loaded, _NotLoaded):
            self.fault = loaded.reason
            logger.error("%s: cannot be loaded anew (%s); the next try is in %g s", self.name, loaded.reason, self._wait_s)
            self._bring_back_later(loop)
            if loaded.device_is_lost:
                self.on_lost_device(loaded.reason)
        else:
            self._copy = _Copy(loaded)
            self.is_up = True
            self.restarts += 1
            logger.warning("%s: is up again", self.name)
        self.on_change(self)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _late(requests: list[InferRequest]) -> list[InferRequest]:
    """Those whose time ran out while they waited for their copy: nobody waits for what it would compute."""
    now = time.monotonic()
    return [request for request in requests if is_late(request, now, now)]


def _lost(requests: list[InferRequest], *, untouched: bool = False) -> Lost:
    return Lost(requests, UnavailableError("the device failed while it computed this request; send it again"), untouched)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
