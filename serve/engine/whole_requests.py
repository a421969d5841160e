"""Schedulers of models that take whole requests, such as Python models, and of decoupled models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.batcher import Batcher
from halfserve.serve.engine.errors import FailedPreconditionError, InferenceError, UnavailableError, UnsupportedError
from halfserve.serve.engine.model import Scheduler
from halfserve.serve.engine.model_statistics import BatchTimes, Statistics
from halfserve.serve.engine.requests import CallingExecution, CallQueue, Done, InferRequest, Respond
from halfserve.serve.engine.tensors import Tensors


class WholeRequests:
    """A scheduler for models that take whole requests, may call other models meanwhile, and clean up at their end.

    A call for which its own model would wait forever is refused, and calls end with the requests for which they are made.
    """

    def __init__(self, name: str, batcher: Batcher, statistics: Statistics, *, one_by_one: bool) -> None:
        """`name`: the model's name; `one_by_one`: whether each batch is one request."""
        self._name = name
        self._batcher = batcher
        self._statistics = statistics
        self._one_by_one = one_by_one

    def submit(self, request: InferRequest) -> None:
        """See `Scheduler`.

        Raises:
            FailedPreconditionError: each copy of the model waits for this request already.
            UnavailableError: each copy waits for this request, or for others that wait for it.
        """
        callers = request.callers
        if callers and self.is_stuck(callers, frozenset({self})):
            refusal = self._endless(callers)
            self._statistics.failed(request.arrived_ns, refusal)
            raise refusal
        if self._one_by_one:
            request.bucket = object()
        self._batcher.submit(request)
        for caller in callers:
            caller.enter(self, request)

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return self._batcher.is_idle

    def holds(self, request: InferRequest) -> bool:
        return request.line is not None or any(request in instance.next_requests for instance in self._batcher.instances)

    def is_stuck(self, asking: tuple[CallingExecution, ...], seen: frozenset[CallQueue]) -> bool:
        executions = [instance.caller for instance in self._batcher.instances]
        return all(one is not None and (one in asking or _waits_at(one, asking, seen)) for one in executions)

    def cancel(self, request: InferRequest) -> None:
        self._batcher.cancel(request)
        for instance in self._batcher.instances:
            caller = instance.caller
            if caller is not None and request in caller.requests and caller.is_left:
                for call in tuple(caller.calls):
                    call.end(left_error(caller))

    async def drain(self) -> None:
        await self._batcher.drain()
        for instance in self._batcher.instances:
            await instance.closed()

    def _endless(self, callers: tuple[CallingExecution, ...]) -> InferenceError:
        count, chain = len(self._batcher.instances), " -> ".join([*(caller.label for caller in callers), self._name])
        own = {instance.caller for instance in self._batcher.instances}
        if own.issubset(callers):
            return FailedPreconditionError(
                f"model {self._name!r} is called by itself ({chain}), and its {count} instance(s) wait for the answer already; "
                "end the cycle, or raise the count of its instance_group"
            )
        return UnavailableError(
            f"model {self._name!r} is called ({chain}) while its {count} instance(s) wait for calls that wait for this one; "
            "send the request again, and raise the count of its instance_group"
        )


def _waits_at(caller: CallingExecution, asking: tuple[CallingExecution, ...], seen: frozenset[CallQueue]) -> bool:
    """Return whether an execution waits for a request in a queue that is stuck or seen."""
    queues = {queue for queue, request in caller.queued if queue.holds(request)}
    return any(queue in seen or queue.is_stuck(asking, seen | {queue}) for queue in queues)


def left_error(caller: CallingExecution) -> InferenceError:
    """Return the error of a call whose answer is no longer wanted."""
    return UnavailableError(f"the clients of model {caller.label!r} for which it makes this call have gone")


def require_many(request: InferRequest, name: str) -> Respond:
    """Return the function that takes the responses to a request of the decoupled model `name`.

    Raises:
        UnsupportedError: the request takes a single response.
    """
    if request.respond is None:
        text = f"model {name!r} is decoupled: it gives any number of responses to a request; send it by ModelStreamInfer"
        raise UnsupportedError(text).like(TritonPhrase.DECOUPLED)
    return request.respond


class DecoupledRequests:
    """A scheduler for decoupled models: a batch only begins its requests, which then get any number of responses.

    Attributes:
        behind: the scheduler to which it passes requests.
    """

    def __init__(self, name: str, scheduler: Scheduler, statistics: Statistics) -> None:
        self.behind = scheduler
        self._name = name
        self._statistics = statistics
        self._unfinished: dict[int, _Unfinished] = {}  # keys: id() of the request
        self._finished = asyncio.Event()

    def submit(self, request: InferRequest) -> None:
        """See `Scheduler`.

        Raises:
            UnsupportedError: the request takes a single response.
        """
        respond = require_many(request, self._name)
        unfinished = _Unfinished(self, request, request.done, respond)
        request.done, request.respond = unfinished.done, unfinished.respond
        self._unfinished[id(request)] = unfinished
        try:
            self.behind.submit(request)
        except InferenceError:
            self.ended(request)
            raise

    def cancel(self, request: InferRequest) -> None:
        is_waiting = request.line is not None
        self.behind.cancel(request)
        if self.ended(request) and not is_waiting:
            self._statistics.failed(request.arrived_ns)
        if request.progress is not None:
            request.progress.gone()

    async def drain(self) -> None:
        # The batcher stops its instances when its queue is empty, which may be before the last response has come.
        while self._unfinished:
            self._finished.clear()
            await self._finished.wait()
        await self.behind.drain()

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return not self._unfinished and self.behind.is_idle

    def ended(self, request: InferRequest) -> bool:
        """Record that a request gets nothing more; returns whether it was unfinished."""
        known = self._unfinished.pop(id(request), None) is not None
        self._finished.set()
        return known

    def count(self, request: InferRequest, first_ns: int | None, result: Tensors | InferenceError) -> None:
        """Record a finished request, unless the batcher has recorded its error."""
        if isinstance(result, InferenceError):
            if self._statistics.latest_failure[0] != id(result):
                self._statistics.failed(request.arrived_ns, result)
            return
        now = time.monotonic_ns()
        times = BatchTimes(started=request.arrived_ns, assembled=request.arrived_ns, computed=first_ns or now, split=now)
        self._statistics.batch_done(times, [request.arrived_ns], request.rows)


class _Unfinished:
    """A request that has not had its final response."""

    __slots__ = ("_done", "_first_ns", "_request", "_respond", "_scheduler")

    def __init__(self, scheduler: DecoupledRequests, request: InferRequest, done: Done, respond: Respond) -> None:
        self._scheduler = scheduler
        self._request = request
        self._done = done
        self._respond = respond
        self._first_ns: int | None = None

    def respond(self, response: Tensors | InferenceError, final: bool, read: Callable[[], None]) -> None:
        if self._first_ns is None:
            self._first_ns = time.monotonic_ns()
        self._respond(response, final, read)

    def done(self, result: Tensors | InferenceError) -> None:
        if self._scheduler.ended(self._request):
            self._scheduler.count(self._request, self._first_ns, result)
        self._done(result)
