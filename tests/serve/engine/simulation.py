"""Queueing on a virtual clock: requests for the pure parts, and a simulated model under load."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.queueing.admission_control import AdmissionControl, RunningBatch
from halfserve.serve.engine.queueing.batch_queue import Batch, BatchQueue
from halfserve.serve.engine.queueing.pace import BatchLimits, Pace
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest


def new_request(rows: int = 1, bucket: Hashable = "a", deadline: float | None = None, **rest: Any) -> InferRequest:
    """A request for the pure parts of the queue."""
    return InferRequest({}, (), rows, bucket, deadline, print, **{"arrived_ns": 0, **rest})


def queue(**limits: object) -> BatchQueue:
    return BatchQueue(BatchLimits(**{"max_rows": 8, **limits}))  # type: ignore[arg-type]  # (keyword by keyword in the tests)


def offer(q: BatchQueue, request: InferRequest, now: float) -> InferRequest:
    request.arrived_ns = round(now * 1e9)
    q.offer(request)
    return request


def take(q: BatchQueue, now: float) -> Batch:
    batch = q.take(now)
    assert batch is not None
    return batch


def offer_all(q: BatchQueue, requests: list[InferRequest], now: float = 0.0) -> None:
    for request in requests:
        offer(q, request, now)


Cost = Callable[[int, float], float]  # seconds of a batch, from its rows and the time


@dataclass(frozen=True, kw_only=True)
class Client:
    at: float
    within: float | None = None  # seconds from then to its deadline; None has none
    waits: float | None = None  # seconds that it may wait in the queue; None for ever
    rows: int = 1
    bucket: str = "a"
    priority: int = 0  # 0 the most urgent
    cancels_after: float | None = None  # seconds after which the client goes; None stays


@dataclass
class Outcome:
    """What became of one request: "answered", "late" (never computed), "refused", "full" or "cancelled", and when."""

    client: Client
    ends: list[tuple[str, float]] = field(default_factory=list)
    error: InferenceError | None = None

    @property
    def kind(self) -> str:
        ((kind, _),) = self.ends
        return kind

    @property
    def took(self) -> float:
        ((_, at),) = self.ends
        return at - self.client.at

    @property
    def is_good(self) -> bool:
        return self.kind == "answered" and (self.client.within is None or self.took <= self.client.within)


class Simulation:
    def __init__(self, limits: BatchLimits, cost: Cost, *, instances: int = 1, foresees: bool = True) -> None:
        self.outcomes: list[Outcome] = []  # one per client, in order of arrival
        self.batches: list[tuple[float, int]] = []  # (start, rows) of each batch
        self.now = 0.0
        self._cost = cost
        self._idle = instances
        pace = Pace(limits)
        self._queue = BatchQueue(limits, pace if foresees else None)
        self._admission = AdmissionControl(self._queue, pace, instances) if foresees else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # among what happens at one time
        self._by_request: dict[int, Outcome] = {}
        self._requests: list[InferRequest] = []  # kept, so that no two have the same identity

    def run(self, clients: list[Client]) -> list[Outcome]:
        for client in clients:
            self._at(client.at, lambda client=client: self._arrive(client))  # type: ignore[misc]  # (a default binds it now)
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            # What comes in the same turn of the loop shares the batch.
            if not self._events or self._events[0][0] > self.now:
                self._dispatch()
        assert len(self._queue) == 0, "nobody is left behind"
        return self.outcomes

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _arrive(self, client: Client) -> None:
        deadline = None if client.within is None else self.now + client.within
        leave_by = None if client.waits is None else self.now + client.waits
        request = InferRequest({}, (), client.rows, client.bucket, deadline, print, client.priority, leave_by=leave_by)
        request.arrived_ns = round(self.now * 1e9)
        outcome = Outcome(client)
        self.outcomes.append(outcome)
        self._requests.append(request)
        self._by_request[id(request)] = outcome
        refusal = self._admission.admit(request, self.now) if self._admission else None
        if refusal is not None:
            outcome.error = refusal
            outcome.ends.append(("refused", self.now))
            return
        try:
            self._queue.offer(request)
        except FullError:
            outcome.ends.append(("full", self.now))
            return
        if client.cancels_after is not None:
            self._at(self.now + client.cancels_after, lambda: self._cancel(request))

    def _cancel(self, request: InferRequest) -> None:
        before = len(self._queue)
        if self._queue.waiting.remove(request):
            assert len(self._queue) == before - 1
            self._end(request, "cancelled")

    def _dispatch(self) -> None:
        while self._idle and (batch := self._queue.take(self.now)) is not None:
            for request in batch.late:
                self._end(request, "late")
            if batch.requests:
                self._start(batch)
        due = self._queue.next_due(self.now) if self._idle else None
        if due is not None:
            self._at(max(due, self.now + 1e-6), lambda: None)

    def _start(self, batch: Batch) -> None:
        self._idle -= 1
        self.batches.append((self.now, batch.rows))
        running = self._admission.started(batch.bucket, batch.rows, self.now) if self._admission else None
        self._at(self.now + self._cost(batch.rows, self.now), lambda: self._finish(batch, running))

    def _finish(self, batch: Batch, running: RunningBatch | None) -> None:
        self._idle += 1
        if self._admission and running:
            self._admission.finished(running, self.now, self.now - running.started_s)
        for request in batch.requests:
            self._end(request, "answered")

    def _end(self, request: InferRequest, kind: str) -> None:
        self._by_request[id(request)].ends.append((kind, self.now))


def linear(fixed: float, per_row: float, *, noise: float = 0.0, seed: int = 0) -> Cost:
    """A model that takes `fixed + per_row * rows` seconds, give or take a part of `noise` (log-normal)."""
    random_ = random.Random(seed)  # noqa: S311  (a simulation, the same each time)
    return lambda rows, now: (fixed + per_row * rows) * random_.lognormvariate(0.0, noise)


def poisson(rate: float, seconds: float, *, seed: int = 0, within: float | None = None) -> list[Client]:
    """Requests of one row that come at random, `rate` a second."""

    def times() -> Iterator[float]:
        random_, at = random.Random(seed), 0.0  # noqa: S311  (a simulation, the same each time)
        while (at := at + random_.expovariate(rate)) < seconds:
            yield at

    return [Client(at=at, within=within) for at in times()]


def goodput(outcomes: list[Outcome], since: float) -> float:
    """Requests a second that were answered in time, counting arrivals after `since` seconds."""
    counted = [outcome for outcome in outcomes if outcome.client.at >= since]
    return sum(outcome.is_good for outcome in counted) / (counted[-1].client.at - since)


def percentile(values: list[float], part: float) -> float:
    """The value that `part` of them stay at or below."""
    return sorted(values)[max(0, round(part * len(values)) - 1)]
