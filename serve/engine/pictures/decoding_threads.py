"""The threads that decode pictures for all models: in turns of the clients, within a bound of memory.

No library can be stopped inside a picture, so that bounds come first (see protos/picture_files). The threads do not keep the
process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, QueueFullError, UnavailableError
from halfserve.serve.engine.pictures.decoding_job import DecodingJob
from halfserve.serve.engine.queueing.client_queue import ClientQueue
from halfserve.serve.engine.resource_limits import BudgetShare

PICTURE_THREADS: Final = 2  # so that decoding leaves the other cores to the models; one is always free of long pictures
MOST_REQUESTS: Final = 8192  # unanswered ones with pictures, over all models
DEFAULT_BYTES: Final = 2**28
SMALL_BYTES: Final = 2**24  # memory to decode a picture of up to 1.8 million pixels; see `DecodingThreads.small_bytes`
KEPT_PART: Final = 8  # 1/8 of the memory is for pixels, the rest for decoding
RETRY_S: Final = 1.0
FULL: Final = "the server holds as much memory for clients as it may (--max-buffered-mib); retry with back-off"


class DecodingThreads:
    """Runs the steps of jobs. On the event loop only."""

    def __init__(self) -> None:
        """Begin with DEFAULT_BYTES; no thread is started before the first picture."""
        self._limit = DEFAULT_BYTES
        self._share: BudgetShare | None = None
        self._waiting: ClientQueue[DecodingJob] = ClientQueue()
        self._long: ClientQueue[DecodingJob] = ClientQueue()  # decoded one at a time; short ones do not wait for them
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._working = self._kept = 0  # bytes of the steps in progress, and of pixels
        self._requests = 0
        self._has_long = False  # whether a long step is in progress

    def bound(self, limit_bytes: int, share: BudgetShare) -> None:
        """Bound the memory, and count it in a share of the server's. To be called before the first request."""
        self._limit, self._share = limit_bytes, share

    @property
    def held_bytes(self) -> int:
        """Memory of all jobs, as far as it is counted."""
        return self._working + self._kept

    @property
    def small_bytes(self) -> int:
        """Memory that a picture may take without waiting for its own."""
        return min(SMALL_BYTES, self._limit // KEPT_PART)

    @property
    def most_bytes(self) -> int:
        """Memory that one picture may take, so that a small one can be decoded beside it."""
        return self._limit - self._limit // KEPT_PART - self.small_bytes

    def add(self, job: DecodingJob) -> None:
        """Decode the pictures of a request in its client's turns; `job.ended` is called later, unless `end` is called before.

        Raises:
            QueueFullError: too many requests are unanswered.
            UnavailableError: no thread can be started.
            InvalidArgumentError: the pixels take too much memory.
        """
        if job.pixel_bytes > self.most_bytes:
            raise InvalidArgumentError(
                f"the pixels of the pictures have {job.pixel_bytes:,} bytes, expected at most {self.most_bytes:,}; send fewer "
                "at once, or start the server with a larger --max-buffered-mib"
            )
        if self._requests >= MOST_REQUESTS:
            raise QueueFullError(f"{MOST_REQUESTS} requests with pictures are unanswered; retry later", retry_after_s=RETRY_S)
        if not self._workers:
            self._start()
        self._requests += 1
        self._waiting.append(job.client, job)
        self._fill()

    def end(self, job: DecodingJob) -> None:
        """Give back the memory of an added job, once: its pixels are no longer needed. A step in progress ends first."""
        job.is_over = True
        self._requests -= 1
        if not job.is_running:
            self._release(job)
            self._fill()

    def stop(self) -> None:
        """End the threads after the pictures that they are decoding."""
        for worker in self._workers:
            worker.stop()
        self._workers, self._idle = [], []

    def _start(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started
            while len(self._workers) < PICTURE_THREADS:
                self._workers.append(Worker(f"pictures-{len(self._workers)}"))
        if not self._workers:
            raise UnavailableError("the server cannot start a thread to decode pictures; retry", retry_after_s=RETRY_S)
        self._idle = self._workers.copy()

    def _fill(self) -> None:
        """Give idle threads their next jobs."""
        while self._idle and (job := self._next()) is not None:
            self._run(job)

    def _next(self) -> DecodingJob | None:
        """Take the next job; one without room is skipped, behind those of the other clients."""
        for queue in (self._waiting,) if self._has_long else (self._long, self._waiting):
            skipped = 0
            while skipped < queue.clients:
                job = queue.take()
                if job.is_over:
                    continue
                if self._has_room(job):
                    return job
                queue.put_back(job.client, job)
                skipped += 1
        return None

    def _has_room(self, job: DecodingJob) -> bool:
        """Return whether a job may begin its next step. With nothing else in progress any job may, and a small one always."""
        part = self._limit // KEPT_PART
        if not job.is_started and self._kept and self._kept + job.pixel_bytes > part:
            return False
        if not self._working or job.needs_bytes <= 2 * self.small_bytes:
            return True
        return self._working + job.needs_bytes <= self._limit - part

    def _run(self, job: DecodingJob) -> None:
        claim, is_long, share = job.needs_bytes, job.is_long, self._share
        if not job.is_started:
            job.is_started = True
            self._kept += job.pixel_bytes
        self._working += claim
        self._report()
        if is_long and share is not None and share.is_crowded_out:  # waiting would keep its file, as those of others that wait
            self._working -= claim
            self._report()
            job.ended(UnavailableError(FULL, retry_after_s=RETRY_S))
            return
        self._has_long |= is_long
        job.is_running = True
        worker, loop, most = self._idle.pop(), asyncio.get_running_loop(), self.most_bytes

        def step() -> None:
            error = job.step(most)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._stepped, worker, job, claim, is_long, error)

        worker.submit(step)

    def _stepped(self, worker: Worker, job: DecodingJob, claim: int, is_long: bool, error: InferenceError | None) -> None:
        job.is_running = False
        if worker in self._workers:
            self._idle.append(worker)
        self._working -= claim
        self._has_long &= not is_long
        if job.is_over:
            self._release(job)
        elif error is None and not job.is_done:
            self._wait_again(job)
        else:
            job.ended(error)
        self._report()
        self._fill()

    def _wait_again(self, job: DecodingJob) -> None:
        """Let a job wait for its client's next turn: before the others of the client if it holds pixels already."""
        queue = self._long if job.is_long else self._waiting
        if job.has_pixels:
            queue.put_back(job.client, job)
            return
        queue.append(job.client, job)
        job.is_started = False
        self._kept -= job.pixel_bytes

    def _release(self, job: DecodingJob) -> None:
        job.clear()
        if job.is_started:
            self._kept -= job.pixel_bytes
            self._report()

    def _report(self) -> None:
        if self._share is not None:
            self._share.resize(self.held_bytes)
