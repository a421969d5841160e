"""The scheduler of models that take encoded pictures: requests enter the model's queue once their pictures are pixels."""

from __future__ import annotations

import asyncio
import time

from halfserve.serve.engine.dispatch.refusals import SHUTTING_DOWN
from halfserve.serve.engine.errors import InferenceError, UnavailableError
from halfserve.serve.engine.model import Model, Scheduler
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.pictures.decoding_job import DecodingJob
from halfserve.serve.engine.pictures.decoding_threads import DecodingThreads
from halfserve.serve.engine.pictures.encoded_inputs import EncodedInputs
from halfserve.serve.engine.queueing.admission_control import late_error
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors


def take_pictures(model: Model, threads: DecodingThreads) -> None:
    """Decode encoded pictures before a model's other schedulers, if it takes any. To be called before the first request."""
    if model.pictures:
        model.scheduler = PictureScheduler(model.scheduler, model.statistics, threads)


class PictureScheduler:
    """Has pictures decoded, and passes all other requests on. Lives on the event loop.

    Attributes:
        threads: decode the pictures of all models.
    """

    def __init__(self, behind: Scheduler, statistics: Statistics, threads: DecodingThreads) -> None:
        """`behind`: takes the requests with pixels."""
        self._behind = behind
        self._statistics = statistics
        self.threads = threads
        self._pending: dict[int, _PendingPictures] = {}  # requests that hold memory of `threads`, by their id()
        self._undecoded = 0
        self._is_draining = False
        self._decoded = asyncio.Event()

    def submit(self, request: InferRequest) -> None:
        """See `Scheduler`.

        Raises:
            QueueFullError: too many requests wait for their pictures to be decoded.
        """
        inputs = request.inputs
        if type(inputs) is not EncodedInputs:
            self._behind.submit(request)
            return
        pending = _PendingPictures(self, request, inputs)
        try:
            if self._is_draining:
                raise UnavailableError(SHUTTING_DOWN)
            self.threads.add(pending.job)
        except InferenceError as error:
            self._statistics.failed(request.arrived_ns, error)
            raise
        self._pending[id(request)] = pending
        self._undecoded += 1
        request.line = pending
        pending.watch_time()

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return not self._undecoded and self._behind.is_idle

    def cancel(self, request: InferRequest) -> None:
        pending = self._pending.get(id(request))
        is_undecoded = request.line is pending
        if pending is not None:
            self._leave(pending)
        if pending is None or not is_undecoded:
            self._behind.cancel(request)
            return
        request.cancelled = True
        self._statistics.failed(request.arrived_ns)

    async def drain(self) -> None:
        """Refuse further pictures, finish the accepted ones, and drain the model."""
        self._is_draining = True
        while self._undecoded:
            self._decoded.clear()
            await self._decoded.wait()
        await self._behind.drain()

    def pass_on(self, pending: _PendingPictures, inputs: EncodedInputs) -> None:
        """Queue a request whose pictures are decoded. Its memory counts until it is answered."""
        request, pixels = pending.request, pending.job.take_pixels()
        request.inputs = inputs.with_pixels(pixels)
        request.size = pixels.nbytes + inputs.nbytes
        request.done = pending.answered
        self._no_longer_undecoded(request)
        try:
            self._behind.submit(request)
        except InferenceError as refusal:
            request.finish(refusal)

    def fail(self, pending: _PendingPictures, error: InferenceError) -> None:
        """Answer a request that does not enter the queue."""
        request = pending.request
        self._leave(pending)
        self._statistics.failed(request.arrived_ns, error)
        request.finish(error)

    def answered(self, pending: _PendingPictures) -> None:
        self._leave(pending)

    def _leave(self, pending: _PendingPictures) -> None:
        request = pending.request
        if self._pending.pop(id(request), None) is None:
            return
        if request.line is pending:
            self._no_longer_undecoded(request)
        pending.close()
        self.threads.end(pending.job)

    def _no_longer_undecoded(self, request: InferRequest) -> None:
        request.line = None
        self._undecoded -= 1
        self._decoded.set()


class _PendingPictures:
    """A request with pictures until it is answered."""

    __slots__ = ("_done", "_inputs", "_scheduler", "_timer", "job", "request")

    def __init__(self, scheduler: PictureScheduler, request: InferRequest, inputs: EncodedInputs) -> None:
        self.request = request
        self.job = DecodingJob(inputs.pictures, request.size, scheduler.threads.small_bytes, self._ended)
        self._scheduler = scheduler
        self._inputs: EncodedInputs | None = inputs
        self._done = request.done
        self._timer: asyncio.TimerHandle | None = None

    def watch_time(self) -> None:
        """Fail the request when its time is up, though its pictures are not decoded."""
        times = [at for at in (self.request.deadline, self.request.leave_by) if at is not None]
        if times and self._inputs is not None:
            soonest = min(times)
            left_s = max(0.0, soonest - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._time_is_up, soonest)

    def answered(self, result: Tensors | InferenceError) -> None:
        done = self._done
        self._scheduler.answered(self)
        done(result)

    def close(self) -> None:
        """Break the reference cycles."""
        self._stop_watching()
        self.request.done = self._done
        self.job.ended = _no_longer

    def _ended(self, error: InferenceError | None) -> None:
        inputs = self._inputs
        self._stop_watching()
        if error is not None:
            self._scheduler.fail(self, error)
        elif inputs is not None:
            self._scheduler.pass_on(self, inputs)

    def _time_is_up(self, since: float) -> None:
        now = max(since, time.monotonic())  # the loop's clock may be ahead
        self._scheduler.fail(self, late_error(self.request, now))

    def _stop_watching(self) -> None:
        self._inputs = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _no_longer(_: InferenceError | None) -> None:
    """Do nothing: replaces the listener of a job whose request has been answered."""
