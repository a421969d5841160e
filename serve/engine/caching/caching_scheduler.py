"""Scheduler of models whose configuration says `response_cache { enable: true }`: it answers from the response cache."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic_ns
from typing import Final

from halfserve.serve.engine.caching.response_cache import (
    CachedAnswer,
    RequestKey,
    RequestKeys,
    ResponseCache,
    key_of,
    settled,
    takes_long,
)
from halfserve.serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    InferenceError,
    OutOfMemoryError,
    is_out_of_memory,
)
from halfserve.serve.engine.model import Model, Scheduler
from halfserve.serve.engine.model_statistics import Statistics
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

SWITCHED_OFF: Final = "%s/%s: response_cache has no effect, as the server has --response-cache-mib 0"


def cache_answers(model: Model, cache: ResponseCache | None) -> None:
    """Put the response cache before a model's scheduler, if its configuration asks for it. To be called before the first
    request.

    The answers belong to this loaded version: neither another version nor the next load of this one finds them, and a client
    that may not use the model does not reach them either.
    """
    if not model.config.response_cache.enable:
        return
    if cache is None:
        logger.warning(SWITCHED_OFF, model.name, model.version, extra={"model": f"{model.name}/{model.version}"})
    else:
        model.scheduler = CachingScheduler(model.scheduler, model.statistics, cache)


class _Computation:
    """The cache's own request to the model, and the clients' requests that wait for its answer.

    The model gets a separate request, so that the computation goes on for the others when the first client has gone.

    Attributes:
        key: cache key of all these requests.
        own: the request that the model computes.
        waiting: clients' requests in order of arrival; the model's statistics count `own` for the first one.
        spent_ns: nanoseconds that the cache has taken for the first one.
    """

    __slots__ = ("_scheduler", "key", "own", "spent_ns", "waiting")

    def __init__(self, scheduler: CachingScheduler, key: RequestKey, first: InferRequest, spent_ns: int) -> None:
        self._scheduler = scheduler
        self.key = key
        self.waiting = [first]
        self.spent_ns = spent_ns
        first.line = self
        inputs, outputs, rows, bucket = first.inputs, first.outputs, first.rows, first.bucket
        priority, patience, leave_by, size = first.priority, first.patience, first.leave_by, first.size
        self.own = first.derived(inputs, outputs, rows, bucket, self, priority, patience, leave_by, size)
        self.own.arrived_ns = first.arrived_ns

    def __call__(self, result: Tensors | InferenceError) -> None:
        """Take the model's answer or error."""
        self._scheduler.computed(self, result)

    def suits(self, request: InferRequest) -> bool:
        """Return whether a request may wait for this computation.

        The computation must be urgent enough, may not wait in the queue beyond the request's own timeout, and must not wait for
        this request: the models that a computation calls have other callers than its own request.
        """
        own, leave_by = self.own, request.leave_by
        in_time = own.line is None or leave_by is None or (own.leave_by is not None and own.leave_by <= leave_by)
        return in_time and own.priority <= request.priority and own.callers == request.callers

    def add(self, request: InferRequest) -> None:
        request.line = self
        self.waiting.append(request)

    def end(self) -> None:
        """Break the reference cycle with the computed request, whose inputs may be large."""
        self.own.done = _no_longer


class CachingScheduler:
    """Answers repeated requests from the response cache, and computes identical requests in flight once.

    Errors are not kept. A request whose time ran out fails alone, and the next one that waits for the same answer is computed;
    """

    def __init__(self, model: Scheduler, statistics: Statistics, cache: ResponseCache) -> None:
        """`model`: scheduler that computes the requests without a cached answer."""
        self._model = model
        self._statistics = statistics
        self._cache = cache
        self._keys = RequestKeys()
        self._answers: dict[RequestKey, CachedAnswer] = {}
        self._computing: dict[RequestKey, _Computation] = {}  # the most urgent computation of each key
        self._reading: set[asyncio.Task[None]] = set()
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Requests found in the cache, which are answered in the next turn of the loop, with their answers and times.
        self._hits: list[InferRequest] = []
        self._given: list[Tensors] = []
        self._asked_at: list[int] = []
        self._looked_ns = 0  # time of all these look-ups together

    def submit(self, request: InferRequest) -> None:
        """See `Scheduler.submit`. A request with large inputs may be refused later, by its `done`."""
        if self._draining:
            self._model.submit(request)  # refuses it
        elif takes_long(request):
            reading = self._running_loop().create_task(self._read_apart(request))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)
        else:
            began = monotonic_ns()
            self._look_up(request, self._keys.of(request), began, 0)

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return not self._reading and not self._hits and self._model.is_idle

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone. Its computation goes on as long as another request waits for it."""
        if request.cancelled:
            return
        request.cancelled = True
        computation = request.line
        if not isinstance(computation, _Computation):
            return  # a hit is counted in its turn
        request.line = None
        computation.waiting.remove(request)
        if computation.waiting:
            self._statistics.failed(request.arrived_ns)
            return
        if self._computing.get(computation.key) is computation:
            del self._computing[computation.key]
        computation.end()
        self._model.cancel(computation.own)

    async def drain(self) -> None:
        """Finish the accepted requests, and forget the answers."""
        self._draining = True
        if self._reading:
            await asyncio.gather(*self._reading)
        await self._model.drain()
        if self._hits:
            self._answer_hits()
        self._cache.forget(self._answers)

    def computed(self, computation: _Computation, result: Tensors | InferenceError) -> None:
        """Give the model's answer to all requests that wait, and keep it."""
        computation.end()
        if self._computing.get(computation.key) is computation:
            del self._computing[computation.key]
        first, *others = computation.waiting
        for request in computation.waiting:
            request.line = None
        if isinstance(result, InferenceError):
            self._fail(computation.key, first, others, result)
            return
        first.finish(result)
        if others:
            self._share(others, result)
        began = monotonic_ns()
        self._cache.keep(self._answers, computation.key, result)
        self._statistics.cache_miss(computation.spent_ns + monotonic_ns() - began)

    def _share(self, requests: list[InferRequest], answer: Tensors) -> None:
        statistics = self._statistics
        latest, latest_rows, now, count = statistics.latest, statistics.latest_rows, monotonic_ns(), len(requests)
        arrived_ns = sum([request.arrived_ns for request in requests])
        statistics.cache_hits(count, arrived_ns=arrived_ns, asked_ns=now * count, looked_ns=0, ended_ns=now)
        for request in requests:
            request.finish(answer)
        statistics.latest, statistics.latest_rows = latest, latest_rows  # the values belong to the others of the batch

    def _look_up(self, request: InferRequest, key: RequestKey, began: int, read_ns: int) -> None:
        """Answer or compute a request.

        `began`: time at which the look-up began; `read_ns`: time for which its inputs were read before. Both in nanoseconds.
        """
        cached = self._answers.get(key)
        if cached is not None:
            self._cache.use(cached)
            if not self._hits:
                self._running_loop().call_soon(self._answer_hits)
            self._hits.append(request)
            self._given.append(cached.answer)
            self._asked_at.append(began)
            self._looked_ns += monotonic_ns() - began + read_ns
            return
        computation = self._computing.get(key)
        if computation is not None and computation.suits(request):
            computation.add(request)
        else:
            self._compute(key, request, [], monotonic_ns() - began + read_ns)

    def _answer_hits(self) -> None:
        requests, answers, asked_at = self._hits, self._given, self._asked_at
        looked_ns, self._looked_ns = self._looked_ns, 0
        self._hits, self._given, self._asked_at = [], [], []
        count = arrived_ns = asked_ns = 0
        for request, asked in zip(requests, asked_at, strict=True):
            if request.cancelled:
                self._statistics.failed(request.arrived_ns)
            else:
                count += 1
                arrived_ns += request.arrived_ns
                asked_ns += asked
        now = monotonic_ns()
        self._statistics.cache_hits(count, arrived_ns=arrived_ns, asked_ns=asked_ns, looked_ns=looked_ns, ended_ns=now)
        for request, answer in zip(requests, answers, strict=True):
            request.finish(answer)

    def _compute(self, key: RequestKey, first: InferRequest, others: list[InferRequest], spent_ns: int) -> None:
        """Submit a request to the model."""
        computation = _Computation(self, key, first, spent_ns)
        try:
            self._model.submit(computation.own)
        except InferenceError:
            first.line = None
            computation.end()
            raise
        self._computing[key] = computation
        for request in others:
            computation.add(request)

    def _fail(self, key: RequestKey, first: InferRequest, others: list[InferRequest], error: InferenceError) -> None:
        first.finish(error)
        while others and isinstance(error, DeadlineExceededError):  # the time of the first was up, not that of the others
            first, *others = others
            try:
                self._compute(key, first, others, 0)
            except InferenceError as refusal:
                error = refusal  # the model has counted it
                first.finish(error)
            else:
                return
        self._refuse(others, error)

    def _refuse(self, requests: list[InferRequest], error: InferenceError) -> None:
        for request in requests:
            self._statistics.failed(request.arrived_ns, error)
            request.finish(error)

    async def _read_apart(self, request: InferRequest) -> None:
        """Read and hash inputs on a thread."""
        began = monotonic_ns()
        try:
            request.inputs, key = await _in_thread(request)
        except InferenceError as error:
            self._refuse([request], error)
            return
        except Exception as error:
            if is_out_of_memory(error):  # as large requests can make it
                logger.error("the inputs of a request cannot be read: memory ran out")  # noqa: TRY400  (the cause is known)
                self._refuse([request], OutOfMemoryError())
                return
            logger.exception("the inputs of a request cannot be read")
            self._refuse([request], BackendError("the inputs of this request cannot be read"))
            return
        if request.cancelled:
            self._statistics.failed(request.arrived_ns)
            return
        now = monotonic_ns()
        try:
            self._look_up(request, key, now, now - began)
        except InferenceError as refusal:
            request.finish(refusal)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop


def _no_longer(_: Tensors | InferenceError) -> None:
    """Do nothing: replaces the `done` of a computation that has ended."""


async def _in_thread(request: InferRequest) -> tuple[Tensors, RequestKey]:
    """Return the inputs, read once, and the key."""

    def read() -> tuple[Tensors, RequestKey]:
        once = settled(request.inputs)
        return once, key_of(request, once)

    try:
        return await asyncio.to_thread(read)
    except RuntimeError:  # no thread can be started
        return read()
